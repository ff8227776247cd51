# The commands a developer types, and the only ones CI calls.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint types kernels format gpu-test clean

help:            ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed   ## install, pull SmolLM2-135M-Instruct, answer a question
	@$(BIN)/engine pull smollm2
	@$(BIN)/engine generate --temperature 0 --chat "What is the capital of France? Answer in one sentence."

test: $(VENV)/.installed-dev   ## the whole suite (GPU tests skip where there is no GPU)
	$(BIN)/engine pull smollm2
	$(BIN)/python -m pytest -q -n auto

lint: $(VENV)/.installed-dev   ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev   ## mypy --strict on engine/
	$(BIN)/mypy

kernels: $(VENV)/.installed-dev   ## compile every kernel for every architecture; no spills
	$(BIN)/python -m tests.compile_kernels

format: $(VENV)/.installed-dev   ## reformat
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-test: $(VENV)/.installed-dev   ## the GPU tests; fails where there is no GPU
	ENGINE_REQUIRE_GPU=1 $(BIN)/python -m pytest -q -m gpu

clean:           ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
