# Each target does its own set-up: a virtual environment in .venv, made again when pyproject.toml or constraints.txt
# change. Another interpreter: make PYTHON=python3.12 demo
PYTHON ?= python3
ARGS ?=
FEATURE ?=
FRAMES ?= 1000000
FAULTS ?= 100
SEED ?= 1
TORCH ?= 2.4

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup test test-all test-matrix test-exhaustive test-torch test-kubernetes lint proto chart demo bench-recovery bench-overhead bench-scale bench-repair bench-cluster bench-taskd bench-clusterd bench-chain bench-kubernetes soak fuzz wheels clean

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.ready-to-test ## a virtual environment with everything for development

demo: $(VENV)/.ready-to-run ## a job, a fault, the recovery, and the same bits in the end (FEATURE=NAME; ARGS=--help lists them)
	@$(BIN)/evertrain demo $(FEATURE) $(ARGS)

# Dozens of processes load the same modules in each test: compile them once, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

# What is run how, and what happens when something fails: tools/testing. With ARGS it is pytest with these.
SUITE = $(BIN)/python -m $(if $(ARGS),pytest -m $(1) $(ARGS),tools.testing $@)

test: lint ## what decides about a change: the checkers, and tests of every part (ARGS=tests/clusterd, ARGS='tests/mindio -k plan')
	$(call SUITE,"not matrix and not exhaustive and not kubernetes")

test-matrix: $(VENV)/.ready-to-test ## whole jobs: every fault kind in every phase, every strategy, every flow
	$(call SUITE,"matrix and not exhaustive")

test-exhaustive: $(VENV)/.ready-to-test ## the matrix in full, not in pairs (an hour and a half)
	$(call SUITE,"matrix or exhaustive")

# Torchruns differ, so what turns one into TaskD's agent is tested with others. The builds of PyPI are those for CUDA, 5 GB each.
TORCH_VENV := .venv-torch-$(TORCH)-$(notdir $(PYTHON))
TORCH_PIP := $(TORCH_VENV)/bin/python -m pip --disable-pip-version-check install --constraint $(TORCH_VENV)/constraints.txt

TORCH_TESTS := unit/test_pytorch.py unit/test_spares.py unit/test_meeting.py integration/test_agent.py \
  integration/test_agent_more.py integration/test_known_torch.py integration/test_groups.py

test-torch: $(TORCH_VENV)/.ready-to-test ## TaskD's agent with another torch, in an environment of its own (TORCH=2.4 PYTHON=python3.10; ARGS)
	$(TORCH_VENV)/bin/python -m pytest -n 2 -m "not exhaustive and not kubernetes" $(or $(ARGS),$(addprefix tests/taskd/,$(TORCH_TESTS)))

$(TORCH_VENV)/.ready-to-test: pyproject.toml setup.py constraints.txt
	@echo "== torch $(TORCH) in $(TORCH_VENV)"
	@$(PYTHON) -m venv $(TORCH_VENV)
	@grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	@echo 'torch==$(TORCH).*' >> $(TORCH_VENV)/constraints.txt
	@$(TORCH_PIP) -q torch numpy
	@$(TORCH_PIP) -qq --editable '.[cluster,dev]'
	@touch $@

test-all: $(VENV)/.ready-to-test ## lint, test, matrix, Kubernetes, fuzzing and soak, one after the other, and a table of them (hours)
	$(BIN)/python -m tools.testing test-all

# On a cluster of its own, or on yours: KUBECONFIG=... make test-kubernetes. The contract tests want a token beside it
# (EVERTRAIN_CONTRACT_URL, _TOKEN and _CA), and are left out there without.
KUBERNETES_CONTRACT := $(if $(KUBECONFIG),$(if $(EVERTRAIN_CONTRACT_URL),tests/contract),tests/contract)
KUBERNETES_TESTS := $(BIN)/python -m pytest -m 'kubernetes or not kubernetes' \
  $(if $(ARGS),$(ARGS),tests/kubernetes $(KUBERNETES_CONTRACT))

test-kubernetes: $(VENV)/.ready-to-test ## on a real Kubernetes, made from Debian's sources the first time (root, Debian 12), or KUBECONFIG's
ifeq ($(KUBECONFIG),)
	$(BIN)/python -m tests.kubernetes_cluster -- $(KUBERNETES_TESTS)
else
	$(KUBERNETES_TESTS)
endif

lint: $(VENV)/.ready-to-test ## ruff, mypy, the import layers, and that generated code is current
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.protos --check

proto: $(VENV)/.ready-to-test ## write src/evertrain/wire anew from proto/
	$(BIN)/python -m tools.protos

chart: $(VENV)/.ready-to-test ## write deploy/chart anew from deploy/base and deploy/components (needs kubectl)
	$(BIN)/python -m tools.chart

bench-recovery: $(VENV)/.ready-to-test ## time of each recovery beside its budget and plain torchrun (ARGS=--quick)
	$(BIN)/python -m bench.recovery $(ARGS)

bench-overhead: $(VENV)/.ready-to-test ## what a step costs without any fault (ARGS=--quick)
	$(BIN)/python -m bench.overhead $(ARGS)

bench-scale: $(VENV)/.ready-to-test ## a controller of 100, 1 000 and 10 000 simulated ranks (ARGS=--quick)
	$(BIN)/python -m bench.scale $(ARGS)

bench-repair: $(VENV)/.ready-to-test ## bandwidth of a repair beside bare gloo and a checkpoint (ARGS=--quick or --full)
	$(BIN)/python -m bench.repair $(ARGS)

bench-cluster: $(VENV)/.ready-to-test ## 200 AscendJobs at once on 50 virtual nodes (ARGS=--quick)
	$(BIN)/python -m bench.cluster $(ARGS)

bench-taskd: $(VENV)/.ready-to-test ## a TaskD manager of 1 250 nodes with 10 000 workers (ARGS=--quick)
	$(BIN)/python -m bench.taskd $(ARGS)

bench-clusterd: $(VENV)/.ready-to-test ## a ClusterD of 1 000 jobs under 100 faults a second (ARGS=--quick)
	$(BIN)/python -m bench.clusterd $(ARGS)

bench-chain: $(VENV)/.ready-to-test ## recovery of an AscendJob that ClusterD leads, beside its budgets (ARGS=--quick)
	$(BIN)/python -m bench.chain $(ARGS)

bench-kubernetes: $(VENV)/.ready-to-test ## 500 AscendJobs of 8 pods on a real API server without kubelets (ARGS=--quick)
	$(BIN)/python -m tests.kubernetes_cluster --nodes 0 -- $(BIN)/python -m bench.kubernetes $(ARGS)

soak: $(VENV)/.ready-to-test ## one job under many faults and orders of every kind (FAULTS=100 SEED=1)
	$(BIN)/python -m bench.soak --faults $(FAULTS) --seed $(SEED) $(ARGS)

fuzz: $(VENV)/.ready-to-test ## a million damaged frames at every end of a link (FRAMES=...)
	EVERTRAIN_FUZZ_FRAMES=$(FRAMES) $(BIN)/python -m pytest tests/fuzz $(ARGS)

# What was built before could hold modules that are gone.
wheels: $(VENV)/.ready-to-run ## evertrain, and the same as taskd and mindio_ttp, in dist/
	rm -rf build dist
	$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps -w dist .
	$(BIN)/python -m tools.wheels dist
	@ls dist

clean: ## remove everything that was made
	rm -rf $(VENV) .venv-torch-* build dist src/*.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f src/taskd/python/cython_api/libs/libtaskd.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# No --clear: an environment that was there before may be somebody's own.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "Evertrain needs Python 3.10 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo 'not there')."; \
	  echo "Name another one: make PYTHON=python3.12 ..."; exit 1; }
	@echo "== a virtual environment in $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.ready-to-run: pyproject.toml setup.py constraints.txt src/evertrain/taskd/native/libtaskd.c | $(VENV)/.made
	@echo "== installing PyTorch; this is the long part, once"
	@$(PIP) "torch>=2.6" numpy
	@echo "== installing Evertrain (half a minute)"
	@$(PIP) -qq --editable '.[torch,cluster]'
	@touch $@

$(VENV)/.ready-to-test: $(VENV)/.ready-to-run
	@echo "== installing the tools for testing (half a minute)"
	@$(PIP) -qq --editable '.[torch,cluster,dev]'
	@touch $@
