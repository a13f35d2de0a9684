#!/usr/bin/env bash
# Runs end-to-end tests: e2e/run.sh [PYTEST ARGUMENT...]
#   KUBECONFIG=FILE   on that cluster, which has KubeRay, with the images RLHF_E2E_RUNTIME_IMAGE and
#                     RLHF_E2E_OPERATOR_IMAGE, and claims of RLHF_E2E_STORAGE_CLASS
#   otherwise         on kind, which is started if it is not up, and removed afterwards unless KEEP=1 or it was up before
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cluster=e2e/kind/cluster.sh
images=(localhost/rlhf-runtime:0.1.0 localhost/rlhf-operator:0.1.0)

say() { echo "$(date +%T) e2e: $*" >&2; }

clean_up() {
  if [[ $was_up == yes ]]; then
    say "the cluster stays, as it was up before; make cluster-down removes it"
  elif [[ ${KEEP:-} == 1 ]]; then
    say "the cluster stays (KEEP=1); make cluster-down removes it"
  else
    say "removing the cluster (KEEP=1 keeps it)"
    $cluster down
  fi
}

# Kind's own, as a shell has it that took what `cluster.sh env` prints, is as none: its images are to be made anew.
if [[ -n ${KUBECONFIG:-} && $(realpath -m "$KUBECONFIG") != "$(realpath -m build/cluster/kubeconfig)" ]]; then
  say "on the cluster of KUBECONFIG=$KUBECONFIG"
else
  e2e/kind/prerequisites.sh
  say "on kind, as KUBECONFIG names no other cluster"
  was_up=no
  [[ ! -f build/cluster/kubeconfig ]] || was_up=yes
  $cluster check
  make images
  trap clean_up EXIT
  $cluster up
  $cluster load "${images[@]}"
  variables=$($cluster env)
  eval "$variables"
fi
.venv/bin/python -m pytest --timeout 1800 "$@"
