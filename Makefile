# Two commands matter: `make train` and `make test`. Each makes the environment first, if it isn't there.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

.PHONY: help train test lint format clean
help: ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(READY): pyproject.toml constraints.txt
	@echo "making the environment in $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch numpy
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

train: $(READY) ## train the default job (a GPT on the standard library's text, 2 ranks); ARGS="train.steps=50 ..." changes it
	@echo "training: python scripts/train.py $(ARGS)"
	@$(BIN)/python scripts/train.py $(ARGS)

test: $(READY) ## run the tests; ARGS="tests/state -k name" selects
	@echo "testing: pytest $(ARGS)"
	@$(BIN)/python -m pytest $(ARGS)

lint: $(READY) ## ruff, mypy, layering
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(READY) ## let ruff format and fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove what was made, the environment included
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
