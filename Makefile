# Two commands are enough to begin with: `make demo` and `make test`. Each sets itself up.
#
#   make demo ARGS='--folder DIR --question "..."'      PYTHON=python3.12 make test ARGS="-k ledger"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
PYTHON ?=

.PHONY: help demo test check format bench soak clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  ARGS="..." is passed on, as in: make demo ARGS="--help"'

demo: $(STAMP) ## put a question to a folder of documents (default: this project's docs)
	@exec $(BIN)/retinue demo $(ARGS)

test: $(STAMP) ## run all tests
	@exec $(BIN)/python -m pytest $(ARGS)

check: $(STAMP) ## lint, format, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## let ruff repair and format what it can
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(STAMP) ## measure, print a table, write build/bench.json
	@mkdir -p build
	@exec $(BIN)/python -m benchmarks $(ARGS)

soak: $(STAMP) ## many sessions through one pool, a million interleavings of the ledger (ARGS="--sessions 100000")
	@$(BIN)/python -m benchmarks.soak $(ARGS)
	@exec $(BIN)/python -m benchmarks.soak_ledger $(LEDGER_ARGS)

clean: ## remove .venv and what was built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Made again only when what it installs has changed.
$(STAMP): pyproject.toml constraints.txt
	@python=""; \
	for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	    if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; \
	    then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "retinue: no Python from 3.11 to 3.14 with venv was found (looked for: $(PYTHON) python3 python3.13 python3.12 python3.11)." >&2; \
	    echo "Install one (Debian: apt-get install python3 python3-venv), or name it: PYTHON=/path/to/python make $(MAKECMDGOALS)" >&2; \
	    exit 1; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    echo "retinue: creating $(VENV) with $$($$python --version) ..."; \
	    "$$python" -m venv --clear $(VENV); \
	fi
	@echo "retinue: installing what it needs into $(VENV) (a minute or so, once) ..."
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
	    --constraint constraints.txt --editable '.[dev,openai,anthropic,pydantic-ai,telemetry]' 2>&1 | tee $(VENV)/install.log | \
	    awk '/^Collecting/ { print "  " $$2; fflush() } /^(ERROR|error)/ { print; fflush() }' || \
	    { tail -n 30 $(VENV)/install.log >&2; echo "retinue: the installation failed; all of it is in $(VENV)/install.log" >&2; exit 1; }
	@touch $(STAMP)
