#!/usr/bin/env bash
# A kind cluster with KubeRay, two GPU workers, and KWOK's GPU nodes beside them:
#   e2e/kind/cluster.sh up | down | status | env | check
#   e2e/kind/cluster.sh load IMAGE...     publishes images; a node pulls what it lacks of one when a pod needs it
# Everything that it keeps is in build/cluster: the kubeconfig, which images were published, the folder `volumes` that
# all nodes share, and the logs of the last start.
set -euo pipefail
shopt -s inherit_errexit  # `x=$(publish ...)` ends where a command of it fails

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
state=$root/build/cluster
name=rlhf
kubeconfig=$state/kubeconfig
images=$state/images
log=$state/logs/up.log
gpus=8
workers=2
declare -A path_of=()
nodes=4096  # MiB that the nodes take without a job's image

fail() { echo "cluster: $*" >&2; exit 1; }
say() { echo "$(date +%T) $*" >&2; }
# shellcheck source=e2e/kind/registry.sh
source "$here/registry.sh"
# shellcheck source=e2e/kind/gpus.sh
source "$here/gpus.sh"

# The container engine that runs: Docker if its daemon answers, else podman.
find_engine() {
  if docker info >/dev/null 2>&1; then
    engine=docker
  elif command -v podman >/dev/null; then
    engine=podman
    # A machine without systemd, or with fewer capabilities than podman expects, needs other defaults.
    [[ -n ${CONTAINERS_CONF:-} || -d /run/systemd/system ]] || export CONTAINERS_CONF=$here/containers.conf
  else
    fail "no container engine. Fix: start Docker, or install podman (Debian: apt-get install podman)"
  fi
  export KIND_EXPERIMENTAL_PROVIDER=$engine
}

programs() {
  local program path
  while read -r program path; do path_of[$program]=$path; done < <("$here/build.sh" kind kubectl kuberay kwok registry)
  [[ -n ${path_of[registry]:-} ]] || fail "the programs were not built"
}

kind() { "${path_of[kind]}" "$@"; }
kubectl() { "${path_of[kubectl]}" --kubeconfig="$kubeconfig" "$@"; }
exists() { kind get clusters 2>/dev/null | grep -qx "$name"; }

# Refuses where the engine's disk has too little room. $1: MiB, $2: what for.
need_room() {
  local folder have
  folder=$("$engine" info --format "$([[ $engine == docker ]] && echo '{{.DockerRootDir}}' || echo '{{.Store.GraphRoot}}')")
  have=$(df --output=avail --block-size=M "$folder" 2>/dev/null | tail -n 1 | tr -dc 0-9) || return 0
  (($1 <= have)) || fail "$2: got $((have / 1024)) GiB free at $folder; expected $(($1 / 1024 + 1)). \
Fix: free some ($engine system prune), or move the engine's storage"
}

# What an image takes at its peak: packed in the registry and, while it is unpacked, on each worker. $1: MiB.
room_of() { echo $(($1 * workers + $1 * (workers + 1) / 2 + 1024)); }

# Whether there is room for everything, before minutes of building; `load` knows sizes, here they are rounded up.
check() {
  local need=0 image=5120
  "$engine" image inspect localhost/rlhf-runtime:0.1.0 >/dev/null 2>&1 || need=$((2 * image))
  [[ -s $images ]] || need=$((need + nodes + $(room_of "$image")))
  need_room $need "the images, and a cluster that holds them"
}

create() {
  local image
  need_room $nodes "a cluster"
  image=$("$here/node-image.sh" "$engine")
  # Nodes mount it; a kernel that was built without modules may have none.
  [[ -d /lib/modules ]] || mkdir /lib/modules || fail "got no folder /lib/modules. Fix: sudo mkdir /lib/modules"
  say "creating the cluster from $image"
  # Paths in kind.yaml start at the repository's root.
  (cd "$root" && with_gpus "$here/kind.yaml" | kind create cluster --name "$name" --image "$image" --config - \
    --kubeconfig "$kubeconfig" --wait 180s --retain) >>"$log" 2>&1 && return
  kind export logs --name "$name" "$state/logs/nodes" >>"$log" 2>&1 || true
  tail -n 20 "$log" >&2
  kind delete cluster --name "$name" --kubeconfig "$kubeconfig" >>"$log" 2>&1 || true
  fail "kind could not create the cluster; its nodes' logs are in $state/logs/nodes"
}

# A process of its own: the first command that fails ends it.
install() {
  programs
  offer_gpus
  start_registry
  build_program_image kuberay manager quay.io/kuberay/operator:v1.6.0
  build_program_image kwok kwok registry.k8s.io/kwok/kwok:v0.7.0
  publish quay.io/kuberay/operator:v1.6.0
  publish registry.k8s.io/kwok/kwok:v0.7.0
  kubectl apply --server-side --force-conflicts -k "${path_of[kuberay]%/*}/config/default"
  # Its own limit, a tenth of a CPU, makes a start take minutes.
  kubectl set resources deployment/kuberay-operator --limits=cpu=2,memory=1Gi --requests=cpu=100m,memory=256Mi
  kubectl apply --server-side --force-conflicts -f "$here/manifests"
  kubectl rollout status --timeout=180s deployment/kuberay-operator
  kubectl rollout status --timeout=180s -n kube-system deployment/kwok
  kubectl wait --for=condition=Ready --timeout=120s node --all
}

up() {
  mkdir -p "$state/logs" "$state/volumes"
  : >"$log"
  programs
  if exists; then say "the cluster is there"; else create; fi
  kind export kubeconfig --name "$name" --kubeconfig "$kubeconfig" >>"$log" 2>&1
  say "installing KubeRay and KWOK (log: $log)"
  "${BASH_SOURCE[0]}" install >>"$log" 2>&1 || { tail -n 20 "$log" >&2; fail "not all came up; the log: $log"; }
  status
}

# What the nodes have of an image they keep; the rest is pulled from here when a pod runs there.
load() {
  local image size published total=0 new=()
  (($#)) || fail "got no image; expected one or more. Fix: make cluster-images"
  programs
  exists || fail "there is no cluster. Fix: make cluster-up"
  touch "$images"
  for image; do
    size=$("$engine" image inspect --format '{{.Size}}' "$image") || fail "$engine has no image $image. Fix: make images"
    grep -q "^$image " "$images" || { total=$((total + size / 1048576)); new+=("$image"); }
  done
  ((total == 0)) || need_room "$(room_of "$total")" "${new[*]}"
  for image; do
    say "publishing $image"
    published=$(publish "$image")
    sed -i "\\#^$image #d" "$images"
    echo "$image $published" >>"$images"
  done
}

down() {
  programs
  stop_registry
  kind delete cluster --name "$name" --kubeconfig "$kubeconfig"
  rm -rf "$kubeconfig" "$state/volumes"
  # kind leaves its network; another cluster of its own may use it still.
  [[ -n $(kind get clusters 2>/dev/null) ]] || "$engine" network rm kind >/dev/null 2>&1 || true
}

# What the tests in e2e/ read, as lines for the shell.
env() {
  programs
  exists || fail "there is no cluster. Fix: make cluster-up"
  echo "export KUBECONFIG=$kubeconfig RLHF_E2E_VOLUMES=$state/volumes RLHF_E2E_ENGINE=$engine"
  [[ -z ${CONTAINERS_CONF:-} ]] || echo "export CONTAINERS_CONF=$CONTAINERS_CONF"
  awk '{print "export RLHF_E2E_" ($1 ~ /operator/ ? "OPERATOR" : "RUNTIME") "_IMAGE=" $2}' "$images"
}

status() {
  ((${#path_of[@]})) || programs
  exists || { echo "no cluster: make cluster-up"; exit 1; }
  kubectl get nodes -L gpu -o custom-columns='NODE:.metadata.name,GPU:.metadata.labels.gpu,GPUS:.status.allocatable.nvidia\.com/gpu,READY:.status.conditions[?(@.type=="Ready")].status'
  kubectl get deployments -A -o custom-columns='DEPLOYMENT:.metadata.name,READY:.status.readyReplicas'
  echo "export KUBECONFIG=$kubeconfig"
}

case ${1:-} in
  up | down | status | env | check | load | install) find_engine; "$@" ;;
  *) fail "got '${1:-}'; expected up, down, status, env, check or load" ;;
esac
