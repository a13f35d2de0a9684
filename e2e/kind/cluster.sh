#!/usr/bin/env bash
# A kind cluster with KubeRay, two GPU workers, and KWOK's GPU nodes beside them:
#   e2e/kind/cluster.sh up | down | status
# Everything that it keeps is in build/cluster: the kubeconfig, and the logs of the last start.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
state=$(cd "$here/../.." && pwd)/build/cluster
name=rlhf
kubeconfig=$state/kubeconfig
log=$state/logs/up.log
gpus=8

fail() { echo "cluster: $*" >&2; exit 1; }
say() { echo "$(date +%T) $*" >&2; }

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
  declare -gA path_of
  while read -r program path; do path_of[$program]=$path; done < <("$here/build.sh" kind kubectl kuberay kwok)
  [[ -n ${path_of[kwok]:-} ]] || fail "the programs were not built"
}

kind() { "${path_of[kind]}" "$@"; }
kubectl() { "${path_of[kubectl]}" --kubeconfig="$kubeconfig" "$@"; }
exists() { kind get clusters 2>/dev/null | grep -qx "$name"; }

create() {
  local image
  image=$("$here/node-image.sh" "$engine")
  say "creating the cluster from $image"
  kind create cluster --name "$name" --image "$image" --config "$here/kind.yaml" --kubeconfig "$kubeconfig" \
    --wait 180s --retain >>"$log" 2>&1 && return
  kind export logs --name "$name" "$state/logs/nodes" >>"$log" 2>&1 || true
  tail -n 20 "$log" >&2
  kind delete cluster --name "$name" --kubeconfig "$kubeconfig" >>"$log" 2>&1 || true
  fail "kind could not create the cluster; its nodes' logs are in $state/logs/nodes"
}

# The worker's kubelet keeps resources that it does not know, over restarts too.
offer_gpus() {
  local node key=nvidia.com~1gpu
  for node in $(kubectl get nodes -l pool=gpu -o name); do
    kubectl patch "$node" --subresource=status --type=json -p "[
      {\"op\": \"add\", \"path\": \"/status/capacity/$key\", \"value\": \"$gpus\"},
      {\"op\": \"add\", \"path\": \"/status/allocatable/$key\", \"value\": \"$gpus\"}]"
  done
}

# An image that holds one static program, put on every node. $1: program, $2: name in the image, $3: image.
load_program() {
  local folder
  folder=$(mktemp -d)
  cp "${path_of[$1]}" "$folder/$2"
  printf 'FROM scratch\nCOPY %s /%s\nUSER 65532\nENTRYPOINT ["/%s"]\n' "$2" "$2" "$2" >"$folder/Dockerfile"
  "$engine" build --quiet --tag "$3" "$folder"
  "$engine" save --output "$folder/image.tar" "$3"
  kind load image-archive --name "$name" "$folder/image.tar"
  rm -rf "$folder"
}

install_operators() {
  load_program kuberay manager quay.io/kuberay/operator:v1.6.0
  load_program kwok kwok registry.k8s.io/kwok/kwok:v0.7.0
  kubectl apply --server-side --force-conflicts -k "${path_of[kuberay]%/*}/config/default"
  # Its own limit, a tenth of a CPU, makes a start take minutes.
  kubectl set resources deployment/kuberay-operator --limits=cpu=2,memory=1Gi --requests=cpu=100m,memory=256Mi
  kubectl apply --server-side --force-conflicts -f "$here/manifests"
  kubectl rollout status --timeout=180s deployment/kuberay-operator
  kubectl rollout status --timeout=180s -n kube-system deployment/kwok
  kubectl wait --for=condition=Ready --timeout=120s node --all
}

up() {
  mkdir -p "$state/logs"
  : >"$log"
  programs
  if exists; then say "the cluster is there"; else create; fi
  kind export kubeconfig --name "$name" --kubeconfig "$kubeconfig" >>"$log" 2>&1
  say "installing KubeRay and KWOK (log: $log)"
  { offer_gpus && install_operators; } >>"$log" 2>&1 || { tail -n 20 "$log" >&2; fail "not all came up; the log: $log"; }
  status
}

down() {
  programs
  kind delete cluster --name "$name" --kubeconfig "$kubeconfig"
  rm -f "$kubeconfig"
  # kind leaves its network; another cluster of its own may use it still.
  [[ -n $(kind get clusters 2>/dev/null) ]] || "$engine" network rm kind >/dev/null 2>&1 || true
}

status() {
  [[ -n ${path_of[kind]:-} ]] || programs
  exists || { echo "no cluster: make cluster-up"; exit 1; }
  kubectl get nodes -L gpu -o custom-columns='NODE:.metadata.name,GPU:.metadata.labels.gpu,GPUS:.status.allocatable.nvidia\.com/gpu,READY:.status.conditions[?(@.type=="Ready")].status'
  kubectl get deployments -A -o custom-columns='DEPLOYMENT:.metadata.name,READY:.status.readyReplicas'
  echo "export KUBECONFIG=$kubeconfig"
}

case ${1:-} in
  up | down | status) find_engine && "$1" ;;
  *) fail "got '${1:-}'; expected up, down or status" ;;
esac
