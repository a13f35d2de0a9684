# `make help` lists the targets. BUILD=gpu chooses vLLM's CUDA build instead of the CPU one.

BUILD ?= cpu
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rlhf-operator
UV := $(shell uv --version >/dev/null 2>&1 && command -v uv || echo $(CACHE)/uv/bin/uv)
BIN := .venv/bin
READY := .venv/.ready-$(BUILD)
PROJECTS := operator/api operator runtime
JOB ?= examples/01-quickstart.yaml

# Imports of torch and vLLM take three times as long without byte code.
unexport PYTHONDONTWRITEBYTECODE
export UV_LINK_MODE ?= hardlink

.DEFAULT_GOAL := help
.PHONY: help setup run test test-fast lint lint-charts format crds chart pins images clean \
  cluster-programs cluster-up cluster-images cluster-down cluster-status e2e e2e-faults

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Install everything into .venv (about two minutes the first time, nothing afterwards)

run: $(READY) ## Train the quickstart (JOB=FILE for another manifest)
	$(BIN)/rlhf run $(JOB)

test: $(READY) ## Run every test: real Ray, real vLLM, one shortened training run
	$(BIN)/python -m pytest

test-fast: $(READY) ## Run the tests that start no Ray, no vLLM and no cluster
	$(BIN)/python -m pytest --ignore=tests/integration --ignore=tests/cluster

lint: $(READY) ## Check style, types and the layers between modules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/yamllint --strict .
	$(BIN)/shellcheck .ci/run $(shell git ls-files '*.sh')
	$(BIN)/hadolint docker/*.Dockerfile
	$(BIN)/python charts/generate.py --check

lint-charts: $(READY) | $(UV) ## Check the chart and the examples as they are rendered (needs Go; minutes the first time)
	charts/lint.sh $(UV)

format: $(READY) ## Rewrite the code in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

crds: $(READY) ## Write the CustomResourceDefinition from the models, and the chart's copy of it
	$(BIN)/python -m rlhf_operator.crd > crds/rlhfjobs.rlhf-operator.io.yaml
	$(BIN)/python charts/generate.py

chart: $(READY) ## Write what of the chart follows from its values.schema.json and crds/
	$(BIN)/python charts/generate.py

pins: | $(UV) ## Resolve all dependencies anew into requirements/
	$(call compile,cpu,--override requirements/cpu-overrides.txt)
	$(call compile,gpu,)
	$(UV) pip compile --quiet --generate-hashes --custom-compile-command "make pins" --universal \
	  requirements/uv.in -o requirements/uv.txt
	$(call compile-image,operator,--no-emit-package rlhf-api --no-emit-package rlhf-operator \
	  operator/api/pyproject.toml operator/pyproject.toml)
	$(call compile-runtime,cpu,--override requirements/cpu-overrides.txt --override requirements/runtime-cpu-overrides.txt)
	$(call compile-runtime,gpu,)
	$(call compile-image,build,requirements/build.in)
	$(UV) pip compile --quiet --generate-hashes --custom-compile-command "make pins" --python-version 3.11 \
	  --python-platform x86_64-manylinux_2_28 requirements/checkov.in -o requirements/checkov.txt

# What the operator's image has is what the tests ran with, on any processor.
define compile-image
	$(UV) pip compile --quiet --generate-hashes --custom-compile-command "make pins" --python-version 3.11 --universal \
	  --constraint requirements/cpu.txt $(2) -o requirements/$(1).txt
endef

# What the runtime's image has: what the tests ran with, less the tools.
define compile-runtime
	$(UV) pip compile --quiet --generate-hashes --custom-compile-command "make pins" --python-version 3.11 \
	  --python-platform x86_64-manylinux_2_28 --extra $(1) $(2) --constraint requirements/$(1).txt \
	  --no-emit-package rlhf-api --no-emit-package rlhf-runtime \
	  operator/api/pyproject.toml runtime/pyproject.toml -o requirements/runtime-$(1).txt
endef

define compile
	$(UV) pip compile --quiet --generate-hashes --custom-compile-command "make pins" --python-version 3.11 \
	  --python-platform x86_64-manylinux_2_28 --group dev --extra $(1) $(2) \
	  --no-emit-package rlhf-api --no-emit-package rlhf-operator --no-emit-package rlhf-runtime \
	  $(PROJECTS:%=%/pyproject.toml) -o requirements/$(1).txt
endef

images: ## Build the images of the operator and the runtime (minutes the first time, seconds after a change of code)
	BUILD=$(BUILD) docker/build.sh

cluster-programs: ## Build the programs of the test clusters (half an hour on two cores the first time)
	e2e/kind/build.sh

cluster-up: ## Start a kind cluster with KubeRay and simulated GPU nodes
	e2e/kind/cluster.sh up

cluster-images: ## Give it the images of `make images`; nodes pull of them what they lack
	e2e/kind/cluster.sh load localhost/rlhf-runtime:0.1.0 localhost/rlhf-operator:0.1.0

cluster-down: ## Remove it
	e2e/kind/cluster.sh down

cluster-status: ## Tell what runs in it, and how to reach it
	e2e/kind/cluster.sh status

e2e: $(READY) ## Run jobs on kind, or on the cluster of KUBECONFIG (KEEP=1 keeps kind's cluster)
	e2e/run.sh e2e -m "smoke or not fault"

e2e-faults: $(READY) ## Do to jobs all that clusters do to them (about an hour), and write docs/reliability.md
	rm -f build/e2e/faults.jsonl
	e2e/run.sh e2e -m fault
	$(BIN)/python e2e/reliability.py

clean: ## Remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements/$(BUILD).txt $(PROJECTS:%=%/pyproject.toml) | $(UV)
	@echo "Setting up .venv for $(BUILD): torch, Ray and vLLM are large, the first download takes a minute or two."
	@rm -f .venv/.ready-*
	$(UV) venv --quiet --allow-existing --python 3.11 .venv
	VIRTUAL_ENV=.venv $(UV) pip sync --require-hashes requirements/$(BUILD).txt
	VIRTUAL_ENV=.venv $(UV) pip install --quiet --no-deps --no-build-isolation $(PROJECTS:%=-e %)
	@touch $@

$(CACHE)/uv/bin/uv:
	@echo "uv is not on the PATH: installing it into $(CACHE)/uv"
	python3 -m venv $(CACHE)/uv
	$(CACHE)/uv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
