#!/usr/bin/env bash
# Prints the name of a node image for kind, having made sure that the engine has it: e2e/kind/node-image.sh docker|podman
# Where kind's own image cannot be pulled, one is built from pinned modules and Debian packages, once.
set -euo pipefail

engine=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
version=v1.34.4
published=docker.io/kindest/node:v1.34.3
registry=registry.k8s.io
system_images=(kube-apiserver kube-controller-manager kube-scheduler kube-proxy)
logs=$(cd "$here/../.." && pwd)/build/cluster/logs
# Another pin or recipe is another image.
key=$(cat "$here"/node/* "$here"/programs/{kubernetes,coredns,etcd}/go.sum "$here/node-image.sh" | sha256sum)
built=localhost/rlhf-kind-node:$version-${key:0:12}

fail() { echo "node image: $*" >&2; exit 1; }
say() { echo "$(date +%T) node image: $*" >&2; }
have() { "$engine" image inspect "$1" >/dev/null 2>&1; }
image() { "$engine" build --quiet --network host --tag "$@" >>"$logs/node-image.log" 2>&1; }

if have "$built"; then echo "$built"; exit; fi
if have "$published" || timeout 300 "$engine" pull --quiet "$published" >/dev/null 2>&1; then echo "$published"; exit; fi

mkdir -p "$logs"
: >"$logs/node-image.log"
say "kindest/node cannot be pulled: building one (about 25 minutes the first time; log: $logs/node-image.log)"
command -v debootstrap >/dev/null || fail "no debootstrap. Fix: apt-get install debootstrap"
((EUID == 0)) || fail "debootstrap needs root. Fix: sudo -E $0 $engine"
declare -A path_of
while read -r program path; do path_of[$program]=$path; done < <("$here/build.sh" kind kubectl kubeadm kubelet etcd \
  coredns "${system_images[@]}")
[[ -n ${path_of[kube-proxy]:-} ]] || fail "the programs were not built"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say "Debian"
debootstrap --variant=minbase --include=ca-certificates bookworm "$work/rootfs" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" \
  >>"$logs/node-image.log" 2>&1
mkdir "$work/debian"
tar -C "$work/rootfs" --exclude='./var/cache/apt/archives/*.deb' --exclude='./var/lib/apt/lists/*' \
  --exclude='./usr/share/doc/*' --exclude='./usr/share/locale/*' -cf "$work/debian/rootfs.tar" .
rm -rf "$work/rootfs"
printf 'FROM scratch\nADD rootfs.tar /\n' >"$work/debian/Dockerfile"
image localhost/rlhf-kind-debian:1 "$work/debian"

# kubeadm asks for these images by these names; what is not pulled must be there.
say "images of the control plane"
mkdir -p "$work/node/images"
archive() { # name, program, Dockerfile
  local context
  context=$(mktemp -d -p "$work")
  cp "${path_of[$2]}" "$context/$2"
  printf '%b' "$3" >"$context/Dockerfile"
  image "$1" "$context"
  "$engine" save --output "$work/node/images/$2.tar" "$1" >>"$logs/node-image.log" 2>&1
}
for program in kube-apiserver kube-controller-manager kube-scheduler; do
  archive "$registry/$program:$version" "$program" "FROM scratch\nCOPY $program /usr/local/bin/$program\n"
done
archive "$registry/kube-proxy:$version" kube-proxy "FROM localhost/rlhf-kind-debian:1
RUN apt-get update -q && apt-get install -yq --no-install-recommends iptables nftables kmod && rm -rf /var/lib/apt/lists/*
COPY kube-proxy /usr/local/bin/kube-proxy\n"
archive "$registry/etcd:$("${path_of[kubeadm]}" config images list --kubernetes-version $version | sed -n 's#.*/etcd:##p')" \
  etcd "FROM scratch\nCOPY etcd /usr/local/bin/etcd\n"
archive "$("${path_of[kubeadm]}" config images list --kubernetes-version $version | grep coredns)" \
  coredns "FROM scratch\nCOPY coredns /coredns\nENTRYPOINT [\"/coredns\"]\n"
# The image that holds a pod's network only has to stay.
image "$registry/pause:3.10" - <<<$'FROM localhost/rlhf-kind-debian:1\nENTRYPOINT ["/usr/bin/sleep", "infinity"]'
"$engine" save --output "$work/node/images/pause.tar" "$registry/pause:3.10" >>"$logs/node-image.log" 2>&1

say "the node"
cp "$here"/node/* "$work/node"
cp "${path_of[kubeadm]}" "${path_of[kubelet]}" "${path_of[kubectl]}" "$work/node"
cp -r "${path_of[kind]%/*}/node-files" "$work/node/kind-files"
chmod -R u+w "$work/node/kind-files"
echo "$version" | tr -d '\n' >"$work/node/version"
image "$built" "$work/node"
echo "$built"
