# make demo | test | test-all | docs | lint | format | setup | clean. Each installs by itself, once, in $(VENV), what it needs.
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
# One more than the cores of a small machine: a third of the time a worker waits for a child.
JOBS ?= 3

BIN := $(abspath $(VENV))/bin
# One stamp per kind of set-up and device: a machine that gains a GPU installs what was missing.
RUN := $(VENV)/.installed-$(DEVICE)
DEV := $(RUN)-dev
DOCS := $(RUN)-docs
# What times a GPU wants it without other processes.
ALONE = $(if $(filter gpu,$(DEVICE)),$(BIN)/pytest -m alone)

.PHONY: demo test test-all docs lint style types pytest format setup clean
.DEFAULT_GOAL := test

demo: $(RUN)
	@bash scripts/demo.sh "$(BIN)"

# Types are checked beside the tests: pyright takes one core for half a minute.
test: style
	@$(MAKE) --no-print-directory -j2 types pytest

lint: style types

style: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(DEV)
	$(BIN)/pyright --pythonpath $(BIN)/python

# What is marked `slow` is left to `test-all`, which is for the night. By files, since what the tests
# of a module share is made once in each worker that has some of them.
pytest: $(DEV)
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m "not slow and not alone"
	$(ALONE)

test-all: style types
	$(BIN)/pytest -n $(JOBS) --dist loadfile -m "not alone"
	$(ALONE)

# The site, in site/.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build  # not --quiet, by which warnings do not count

format: $(DEV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup: $(DEV)

# Each kind holds what it takes to run, so that a demo after a test installs nothing.
$(RUN) $(DEV) $(DOCS): pyproject.toml setup.py scripts/setup.sh
	@bash scripts/setup.sh "$(PYTHON)" "$(VENV)" "$(DEVICE)" "$(patsubst -%,%,$(subst $(RUN),,$@))" $(VENV_ARGS)
	@touch $(RUN) $@

# Only the default environment: one that was named by VENV=... is yours.
clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
