# Two commands matter: `make train` and `make test`. Each makes the environment first, if it isn't there.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
WORKERS ?= 2

.PHONY: help train test kernels lint format bench bench-peers clean
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

test: $(READY) ## run all tests, files beside each other in WORKERS (2) processes; ARGS="tests/state -k name" selects, one after the other
	@echo "testing: pytest $(or $(ARGS),--numprocesses=$(WORKERS) --dist=loadfile)"
	@$(BIN)/python -m pytest $(or $(ARGS),--numprocesses=$(WORKERS) --dist=loadfile)

kernels: $(READY) ## check every kernel without a GPU: interpreter with memory checks, compiled for four GPUs, table of what they take
	@TRITON_DEFAULT_FP_FUSION=1 PARTITA_LONG_TESTS=1 PARTITA_KERNEL_TESTS=interpreter $(BIN)/python -m pytest --timeout=600 tests/kernels $(ARGS)
	@TRITON_DEFAULT_FP_FUSION=1 PARTITA_LONG_TESTS=1 PARTITA_KERNEL_TESTS=compile $(BIN)/python -m pytest --timeout=600 tests/kernels $(ARGS)
	@TRITON_DEFAULT_FP_FUSION=1 $(BIN)/python tests/kernels/compiling.py

lint: $(READY) ## ruff, mypy, layering
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(READY) ## let ruff format and fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(READY) ## compare sharded training with the peers that are installed; ARGS="--dtype bf16 --accumulation 4"
	@$(BIN)/python scripts/bench/state.py $(ARGS)

bench-peers: $(READY) ## install DeepSpeed for `make bench` (its operators are compiled when they are first used)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check setuptools wheel ninja psutil py-cpuinfo
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation deepspeed

clean: ## remove what was made, the environment included
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
