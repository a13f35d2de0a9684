#!/usr/bin/env bash
# Builds the programs of the test cluster from pinned Go modules, once, into the cache:
#   e2e/kind/build.sh [PROGRAM...]     (all that clusters need when none is named, those of processes before kind's)
# Prints one line a program, "NAME PATH"; progress goes to standard error, each build's log beside the programs.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/rlhf-operator/cluster
clusters=(etcd kube-apiserver kube-controller-manager kube-scheduler kuberay kwok kubectl
  helm kind kubeadm kubelet kube-proxy coredns registry)

# The programs report the release they are; without it kubelet and kubeadm call themselves v0.0.0 and refuse each other.
kubernetes=v1.34.4
component=k8s.io/component-base/version
kubernetes_flags="-X $component.gitVersion=$kubernetes -X $component.gitMajor=1 -X $component.gitMinor=34"
kubernetes_flags+=" -X $component.gitTreeState=clean -X $component.buildDate=2026-01-01T00:00:00Z"

fail() { echo "cluster programs: $*" >&2; exit 1; }

# name -> "module package minutes", the minutes being those of a cold build on two cores.
describe() {
  case $1 in
    etcd) echo "etcd go.etcd.io/etcd/server/v3 1" ;;
    kube-apiserver) echo "kubernetes k8s.io/kubernetes/cmd/kube-apiserver 9" ;;
    kube-controller-manager | kube-scheduler | kubectl | kubelet | kube-proxy | kubeadm)
      echo "kubernetes k8s.io/kubernetes/cmd/$1 3" ;;
    kuberay) echo "kuberay github.com/ray-project/kuberay/ray-operator 2" ;;
    kwok) echo "kwok sigs.k8s.io/kwok/cmd/kwok 2" ;;
    kind) echo "kind sigs.k8s.io/kind 1" ;;
    coredns) echo "coredns github.com/coredns/coredns 3" ;;
    registry) echo "registry github.com/distribution/distribution/v3/cmd/registry 2" ;;
    helm) echo "helm helm.sh/helm/v3/cmd/helm 2" ;;
    kubeconform) echo "kubeconform github.com/yannh/kubeconform/cmd/kubeconform 1" ;;
    *) fail "got $1; expected one of the programs that $0 describes" ;;
  esac
}

link_flags() {
  if [[ $1 == kubernetes ]]; then echo "-s -w $kubernetes_flags"; else echo "-s -w"; fi
}

# The folder of a module's programs: another pin or flag is another folder.
folder() {
  local key
  key=$({ cat "$here/programs/$1/go.mod" "$here/programs/$1/go.sum"; link_flags "$1"; } | sha256sum)
  echo "$cache/bin/$1-${key:0:12}"
}

target() {
  local module _
  read -r module _ <<<"$(describe "$1")"
  echo "$(folder "$module")/$1"
}

build() {
  local name=$1 target=$2 module package minutes log=$2.log started=$SECONDS
  read -r module package minutes <<<"$(describe "$name")"
  command -v go >/dev/null || fail "no Go on the PATH, needed to build $name. Fix: install Go 1.26 or later (https://go.dev/dl)"
  echo "building $name (about $minutes min on two cores, once; log: $log)" >&2
  mkdir -p "${target%/*}"
  (cd "$here/programs/$module" && GOTOOLCHAIN=local CGO_ENABLED=0 GOGC=400 \
    go build -trimpath -buildvcs=false -ldflags "$(link_flags "$module")" -o "$target.new" "$package") >"$log" 2>&1 ||
    { tail -n 20 "$log" >&2; fail "$name was not built; the whole log: $log"; }
  copy_files "$name" "${target%/*}"
  mv "$target.new" "$target"
  echo "built $name in $((SECONDS - started)) s" >&2
}

# What else of a module the cluster uses is kept beside its program, where it needs no module cache.
copy_files() {
  case $1 in
    kuberay) copy_from kuberay github.com/ray-project/kuberay/ray-operator config "$2/config" ;;
    kind) copy_from kind sigs.k8s.io/kind images/base/files "$2/node-files" ;;
    kwok) copy_from kwok sigs.k8s.io/kwok kustomize/stage/pod/fast "$2/pod-stages" ;;
  esac
}

copy_from() { # program, module, folder in the module, target
  local source
  source=$(cd "$here/programs/$1" && go list -m -f '{{.Dir}}' "$2")
  rm -rf "$4"
  cp -r "$source/$3" "$4"
  chmod -R u+w "$4"
}

(($#)) || set -- "${clusters[@]}"
mkdir -p "$cache"
exec 9>"$cache/build.lock"
for program; do
  target=$(target "$program")
  if [[ ! -x $target ]]; then
    flock -n 9 || { echo "waiting for another build of the cluster's programs" >&2; flock 9; }
    [[ -x $target ]] || build "$program" "$target"
    flock -u 9
  fi
  echo "$program $target"
done
