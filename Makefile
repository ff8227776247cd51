# The commands a developer types, and the only ones CI calls.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo model test test-slow test-kills test-all test-clients test-frameworks mutants notebooks newcomer shots lint types kernels format docs gpu-test clean

help:            ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.made
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

# After the other where both are wanted: two pips at once would meet in one environment.
$(VENV)/.installed-dev: pyproject.toml $(VENV)/.made $(if $(filter demo,$(MAKECMDGOALS)),$(VENV)/.installed)
	$(BIN)/python -m pip install --quiet --editable '.[dev,docs]'
	@touch $(VENV)/.installed $@

demo: $(VENV)/.installed   ## install, pull SmolLM2-135M-Instruct, answer a question
	@$(BIN)/engine pull smollm2
	@$(BIN)/engine generate --temperature 0 --chat "What is the capital of France? Answer in one sentence."

model: $(VENV)/.installed-dev   ## pull SmolLM2-135M-Instruct, which the tests read
	$(BIN)/engine pull smollm2

PYTEST := $(BIN)/python -m pytest -q -n auto --dist worksteal

test: model   ## the suite, without the tests marked "kills" and "slow" (GPU tests skip without a GPU)
	$(PYTEST) -m "not kills and not slow"
	@echo "Left out: tests that end, stop or lose processes (make test-kills), and those that take" \
	  "many seconds: soaks, statistics, fuzzing (make test-slow). Marked tests by file:"
	@grep -rcE --include='*.py' '^ *@pytest.mark.(kills|slow)$$|\[pytest.mark.slow\]' tests | grep -v ':0$$' | sort

test-kills: model   ## the tests marked "kills"
	$(PYTEST) -m kills

test-slow: model   ## the tests marked "slow", but not "kills"
	$(PYTEST) -m "slow and not kills"

test-all: model   ## the whole suite
	$(PYTEST)

CLIENTS := tests/clients/libraries
CLIENTS_JS ?= $(CURDIR)/.venv-clients-sdk/js

.venv-clients-%/.installed: $(CLIENTS)/requirements-%.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --editable '.[serve,grammar]' -r $<
	@touch $@

test-clients: model .venv-clients-sdk/.installed .venv-clients-eval/.installed   ## sessions of client libraries, in environments of their own
	-mkdir -p $(CLIENTS_JS) && cd $(CLIENTS_JS) && npm install --silent openai @anthropic-ai/sdk
	CLIENTS_JS=$(CLIENTS_JS) .venv-clients-sdk/bin/python -m pytest -q -W ignore $(CLIENTS)
	.venv-clients-eval/bin/python -m pytest -q -W ignore $(CLIENTS)

FRAMEWORKS := .venv-frameworks
SOURCES := vllm-0.24.0 vllm-0.33.0 sglang-0.5.23  # without a GPU they install only in part

$(FRAMEWORKS)/.installed: $(wildcard tests/integrations/requirements*.txt) pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --editable . -r tests/integrations/requirements.txt
	$(@D)/bin/python -m pip install --quiet --no-deps -r tests/integrations/requirements-vllm.txt
	@touch $@

# The Python files of a wheel, or an empty folder if it cannot be had: then its tests skip.
$(FRAMEWORKS)/sources/%: $(FRAMEWORKS)/.installed
	-$(FRAMEWORKS)/bin/python -m pip download --quiet --no-deps --dest $@.wheel $(subst -,==,$(@F))
	mkdir -p $@
	-unzip -q -o $@.wheel/*.whl '*.py' '*.dist-info/*' -d $@
	rm -rf $@.wheel

test-frameworks: $(SOURCES:%=$(FRAMEWORKS)/sources/%)   ## PyTorch, transformers, JAX and others on our kernels, in an environment of their own
	ENGINE_TEST_VLLM=$(FRAMEWORKS)/sources/vllm-0.33.0 ENGINE_TEST_SGLANG=$(FRAMEWORKS)/sources/sglang-0.5.23 \
	  $(FRAMEWORKS)/bin/python -m pytest -q -n auto --dist worksteal tests/integrations
	ENGINE_TEST_VLLM=$(FRAMEWORKS)/sources/vllm-0.24.0 \
	  $(FRAMEWORKS)/bin/python -m pytest -q tests/integrations/test_vllm.py

mutants: $(VENV)/.installed-dev   ## deliberate faults, each of which a test must catch; 10 minutes
	$(BIN)/python -m tests.mutants

notebooks: model   ## run the examples, and write them with outputs and pictures to build/notebooks
	$(BIN)/python -m tests.notebooks

newcomer: $(VENV)/.installed-dev   ## the commands of the README, typed in a fresh clone, home and environment
	$(BIN)/python -m tests.newcomer

shots: model   ## the pictures of the docs: terminal recordings (needs npm) and the page (needs chromium)
	$(BIN)/python -m tests.newcomer --record
	for name in chat look serve; do npx --yes svg-term-cli --window \
	  --in docs/casts/$$name.cast --out docs/img/terminal-$$name.svg || exit 1; done
	$(BIN)/python -m tests.server.page_screenshots

C_FILES := $(shell find cuda_src engine examples -name '*.cu' -o -name '*.cuh' -o -name '*.[ch]')

lint: $(VENV)/.installed-dev   ## ruff for Python, clang-format for C and CUDA
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)

types: $(VENV)/.installed-dev   ## mypy --strict on engine/
	$(BIN)/mypy

kernels: $(VENV)/.installed-dev   ## compile every kernel, where its code differs (ARCH=all: everywhere); no spills
	$(BIN)/python -m tests.compile_kernels $(addprefix --arch ,$(ARCH))

format: $(VENV)/.installed-dev   ## reformat
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

docs: $(VENV)/.installed-dev   ## the site, in build/site (outputs of the course: after `make notebooks`)
	$(BIN)/python docs/site

# Processes that share the GPUs; 0: this one.
GPU_WORKERS ?= 0

gpu-test: $(VENV)/.installed-dev   ## the GPU tests; fails where there is no GPU
	ENGINE_REQUIRE_GPU=1 $(BIN)/python -m pytest -q -m gpu -n $(GPU_WORKERS) --dist worksteal

clean:           ## remove the environment and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
