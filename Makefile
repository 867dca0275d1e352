# Each target does its own set-up: a virtual environment in .venv, made again when pyproject.toml or constraints.txt
# change. Another interpreter: make PYTHON=python3.12 demo
PYTHON ?= python3
ARGS ?=
FRAMES ?= 1000000

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup test test-matrix lint demo bench-recovery bench-overhead bench-scale bench-repair bench-cluster fuzz clean

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.ready-to-test ## a virtual environment with everything for development

demo: $(VENV)/.ready-to-run ## train, kill a process in the middle, see that the result is the same bits
	@$(BIN)/evertrain demo $(ARGS)

# What mostly thinks or waits shares the cores; whole jobs have them for themselves, for their times mean something.
SHARING := tests/unit tests/contract $(addprefix tests/integration/,test_boot.py test_controller_server.py \
  test_device_groups.py test_fsdp.py test_launch_output.py test_prelude.py test_reducer.py test_repair.py \
  test_takeover.py test_tls_links.py) $(wildcard tests/integration/test_embedded_*.py \
  tests/integration/test_operator_*.py tests/integration/test_tft_*.py tests/e2e/test_cluster_*.py)

test: lint ## the checkers and all tests but the full fault matrix
ifeq ($(ARGS),)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(SHARING)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(SHARING))
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-matrix: $(VENV)/.ready-to-test ## every fault kind in every phase on every kind of rank
	$(BIN)/python -m pytest -m matrix $(ARGS)

lint: $(VENV)/.ready-to-test ## ruff, mypy and the import layers
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

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

fuzz: $(VENV)/.ready-to-test ## a million damaged frames at every end of a link (FRAMES=...)
	EVERTRAIN_FUZZ_FRAMES=$(FRAMES) $(BIN)/python -m pytest tests/fuzz $(ARGS)

clean: ## remove everything that was made
	rm -rf $(VENV) build src/*.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# No --clear: an environment that was there before may be somebody's own.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Evertrain needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo 'not there')."; \
	  echo "Name another one: make PYTHON=python3.12 ..."; exit 1; }
	@echo "== a virtual environment in $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.ready-to-run: pyproject.toml constraints.txt | $(VENV)/.made
	@echo "== installing PyTorch; this is the long part, once"
	@$(PIP) "torch>=2.4" numpy
	@echo "== installing Evertrain"
	@$(PIP) -qq --editable '.[torch]'
	@touch $@

$(VENV)/.ready-to-test: $(VENV)/.ready-to-run
	@echo "== installing the tools for testing"
	@$(PIP) -qq --editable '.[torch,cluster,dev]'
	@touch $@
