# What a developer types. `make` alone lists the targets.
#
# The virtual environment .venv is made on first use with Python 3.11 or newer.
# Variables:
#   PYTHON=python3.12     interpreter to make .venv with; that of test-gpu and bench-gpu,
#                         which run without .venv (default: python3)
#   PIP_ARGS="..."        more arguments to every pip install. On Linux, PyPI's
#                         torch brings gigabytes of CUDA packages; a machine
#                         without a GPU is served faster by
#                         PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#   ARGS="..."            more arguments to baton up (run, up), pytest (test, test-slow)
#                         or baton bench (bench, bench-gpu)

VENV := .venv
BIN := $(VENV)/bin
GPU_PYTHON = $(or $(PYTHON),python3)
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)

.PHONY: help run up test test-slow test-gpu lint type proto bench bench-gpu check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

run: $(VENV)/.base $(VENV)/.native ## start a cluster on the demo model and stream a completion
	@$(BIN)/baton up --demo $(ARGS)

up: $(VENV)/.base $(VENV)/.native ## start a cluster; ARGS="--model ... --decode 2"
	@$(BIN)/baton up $(ARGS)

test: $(VENV)/.test $(VENV)/.native ## run the tests, but for slow ones
	@scripts/ensure_redis.sh
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(VENV)/.test $(VENV)/.native ## run the slow tests: rarer combinations, whole clusters under faults
	@scripts/ensure_redis.sh
	$(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: ## run the Triton kernels' and the device runtime's tests on this machine's GPU
	$(GPU_PYTHON) -m scripts.test_gpu

lint: $(VENV)/.dev ## check style, layers, protos, stubs and the Dockerfile
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	PYTHONPATH=. $(BIN)/lint-imports --no-cache
	$(BIN)/buf lint protos
	$(BIN)/python scripts/generate_stubs.py --check
	$(BIN)/hadolint Dockerfile

type: $(VENV)/.dev ## check types
	$(BIN)/mypy

proto: $(VENV)/.dev ## generate baton/v1 from protos/
	$(BIN)/python scripts/generate_stubs.py

bench: $(VENV)/.bench $(VENV)/.native ## measure; ARGS="serve --target grpc://127.0.0.1:8000", ARGS=--help
	$(BIN)/baton bench $(ARGS)

bench-gpu: ## measure this machine's GPU: kernels, steps, tiers; see docs/gpu.md
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

check: lint type test test-slow ## lint, type and test

clean: ## remove .venv and everything generated outside git
	rm -rf $(VENV) kernels/native/lib .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: each set of packages holds the smaller ones.
$(BIN)/python:
	scripts/make_venv.sh $(VENV)

$(VENV)/.base: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.bench: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) --editable ".[bench]"
	@touch $(VENV)/.base $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) --editable ".[test]"
	@touch $(VENV)/.base $(VENV)/.bench $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) --editable ".[dev]"
	@touch $(VENV)/.base $(VENV)/.bench $(VENV)/.test $@

# The CPU kernels. Installing Baton compiles them too: this is for later changes of the
# sources. 2: there is no compiler, and torch does the work.
$(VENV)/.native: $(wildcard kernels/native/src/* kernels/native/build.py kernels/native/variants.py) | $(BIN)/python
	$(BIN)/python -m kernels.native.build || test $$? -eq 2
	@touch $@
