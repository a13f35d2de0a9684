#!/usr/bin/env bash
# Checks the chart as helm renders it for each file of values in ci/, and what the examples become on a cluster.
# helm and kubeconform are built on first use (`e2e/kind/build.sh`), checkov has an environment of its own: its
# dependencies disagree with ours. `make lint-charts` calls this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

chart=charts/rlhf-operator
cache=${XDG_CACHE_HOME:-$HOME/.cache}/rlhf-operator
out=build/charts
kubernetes=1.34.0

programs=$(e2e/kind/build.sh helm kubeconform kuberay)
path_of() { awk -v name="$1" '$1 == name {print $2}' <<<"$programs"; }
helm=$(path_of helm)
definitions=$(dirname "$(path_of kuberay)")/config/crd/bases

rm -rf "$out"
mkdir -p "$out/rendered" "$out/schemas"

for values in "$chart"/ci/*.yaml; do
  "$helm" lint --quiet --strict --kube-version "$kubernetes" "$chart" --values "$values"
  "$helm" template release "$chart" --namespace ops --kube-version "$kubernetes" --values "$values" \
    >"$out/rendered/$(basename "$values")"
done
for example in examples/*.yaml; do
  .venv/bin/rlhf render "$example" --default-image registry.example/rlhf-runtime:0.1.0 \
    >"$out/rendered/$(basename "$example")" 2>"$out/notes" || { cat "$out/notes" >&2; exit 1; }
done

.venv/bin/python charts/export_schemas.py --kubernetes "$kubernetes" "$out/schemas" crds/*.yaml "$definitions"/*.yaml
"$(path_of kubeconform)" -strict -summary -kubernetes-version "$kubernetes" -skip ServiceMonitor \
  -schema-location "$out/schemas/{{.ResourceKind}}{{.KindSuffix}}.json" examples "$out/rendered"

if ! cmp --silent requirements/checkov.txt "$cache/checkov/installed.txt"; then
  echo "installing checkov into $cache/checkov" >&2
  rm -rf "$cache/checkov"
  "$1" venv --quiet --python 3.11 "$cache/checkov"
  VIRTUAL_ENV=$cache/checkov "$1" pip sync --quiet --require-hashes requirements/checkov.txt
  cp requirements/checkov.txt "$cache/checkov/installed.txt"
fi
# CKV_K8S_21, no default namespace: an example goes into whichever namespace it is applied in.
"$cache/checkov/bin/checkov" --quiet --compact --framework kubernetes --skip-download --skip-check CKV_K8S_21 \
  --directory "$out/rendered"
