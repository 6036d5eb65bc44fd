# make demo | test | test-all | docs | lint | format | clean. Set-up happens by itself, once, in $(VENV).
#
#   PYTHON=python3.12                    another interpreter (3.11 or newer)
#   VENV=path                            another environment, made if it is not there
#   VENV_ARGS=--system-site-packages     start from that interpreter's packages, for instance its own torch
#   DEVICE=cpu|gpu                       overrides what nvidia-smi says
#   JOBS=8                               test workers

PYTHON ?= python3
VENV ?= .venv
VENV_ARGS ?=
DEVICE ?= $(if $(findstring GPU,$(shell nvidia-smi -L 2>/dev/null)),gpu,cpu)
JOBS ?= 2

BIN := $(abspath $(VENV))/bin
# One stamp per device: a machine that gains a GPU installs what was missing.
STAMP := $(VENV)/.installed-$(DEVICE)

.PHONY: demo test test-all docs lint style types pytest format setup clean
.DEFAULT_GOAL := test

demo: $(STAMP)
	@bash scripts/demo.sh "$(BIN)"

# Types are checked beside the tests: pyright takes one core for half a minute.
test: style
	@$(MAKE) --no-print-directory -j2 types pytest

lint: style types

style: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

# What is marked `slow` is left to `test-all`, which is for the night. By files, since what the tests
# of a module share is made once in each worker that has some of them.
pytest: $(STAMP)
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m "not slow"

test-all: style types
	$(BIN)/pytest -n $(JOBS) --dist loadfile

# The site, in site/. Its tools are installed the first time, since nothing else needs them.
docs: $(STAMP)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build  # not --quiet, by which warnings do not count

$(STAMP)-docs: $(STAMP)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input -e ".[docs]"
	@touch $@

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py scripts/setup.sh
	@bash scripts/setup.sh "$(PYTHON)" "$(VENV)" "$(DEVICE)" $(VENV_ARGS)
	@touch $@

# Only the default environment: one that was named by VENV=... is yours.
clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
