# Every target sets up what it needs in .venv; nothing has to be installed by hand but Python 3.11+ with its headers and make.
PYTHON ?= python3
PIP_FLAGS ?=
PYTEST_FLAGS ?=
TEST_WORKERS ?= 2
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
BIN := .venv/bin

# Tests and the quickstart start hundreds of programs, each of which would compile the whole package.
unexport PYTHONDONTWRITEBYTECODE

RUN_TIME := .venv/.run-time
READY := .venv/.ready
CONSTRAINTS := .venv/constraints.txt

.PHONY: help setup constraints quickstart quickstart-bert test test-slow test-exhaustive gpu-check lint figures docs docs-links format clean

help:
	@echo "make quickstart       tokenize real text, train a GPT in a two-rank pipeline, resume, sample, export"
	@echo "make quickstart-bert  the same for a BERT: sentences, masked tokens, gaps filled in"
	@echo "make test             fast tests, under 9 minutes on two cores"
	@echo "make test-slow        what takes longer, under 30 minutes"
	@echo "make test-exhaustive  more layouts, schedules and random examples of what those two show"
	@echo "make gpu-check        GPU tests and benchmarks, on a machine with one or more; continues where it ended"
	@echo "make lint             ruff, mypy for Python 3.11 to 3.13, import-linter"
	@echo "make figures          write every table and picture of the documentation that code makes"
	@echo "make docs             the documentation as a site, in build/docs"
	@echo "make docs-links       try every external link of the documentation; needs a network"
	@echo "make setup            only the environment, in .venv"
	@echo "make constraints      write the versions in .venv to constraints.txt"

$(CONSTRAINTS): constraints.txt
	@$(PYTHON) -m venv .venv || { echo "error: $(PYTHON) has no venv module (Debian: apt-get install python3-venv)"; exit 1; }
	@grep -vE $(if $(filter-out 0,$(GPU)),'^torch==','^$$') constraints.txt >$@

$(RUN_TIME): setup.py $(CONSTRAINTS)
	@echo "installing what runs need into .venv (about a minute after downloads)"
	@$(BIN)/pip install -c $(CONSTRAINTS) $(PIP_FLAGS) -e '.[hf]'
	@touch $@

$(READY): setup.py $(CONSTRAINTS)
	@echo "installing what runs and tests need into .venv (about a minute after downloads)"
	@$(BIN)/pip install -q -c $(CONSTRAINTS) $(PIP_FLAGS) -e '.[test,hf]'
	@touch $(RUN_TIME) $@

setup: $(READY)

constraints: setup
	$(BIN)/python -m tests.packaging.environment >$(CONSTRAINTS).new
	mv $(CONSTRAINTS).new constraints.txt

quickstart: $(RUN_TIME)
	@BIN=$(BIN) bash examples/quickstart.sh

quickstart-bert: $(RUN_TIME)
	@BIN=$(BIN) bash examples/bert_quickstart.sh

test: setup
	$(BIN)/python -m pytest -m "not slow and not exhaustive and not gpu" -n $(TEST_WORKERS) --dist worksteal $(PYTEST_FLAGS)

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not exhaustive and not gpu" -n $(TEST_WORKERS) --dist worksteal $(PYTEST_FLAGS)

test-exhaustive: setup
	$(BIN)/python -m pytest -m "(exhaustive or hypothesis) and not gpu" --all-examples -n $(TEST_WORKERS) --dist worksteal $(PYTEST_FLAGS)

gpu-check: setup
	$(BIN)/python benchmarks/gpu_check.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	printf '%s\n' 3.11 3.12 3.13 | xargs -P $(TEST_WORKERS) -I VERSION $(BIN)/mypy --python-version VERSION -p megapipe
	$(BIN)/lint-imports

figures: setup
	$(BIN)/python -m tests.docs.figures $(FIGURES)

SPHINX := $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --jobs auto

docs: setup
	$(SPHINX) -b html docs build/docs
	@echo "open $(CURDIR)/build/docs/index.html in a browser"

docs-links: setup
	$(SPHINX) -b linkcheck docs build/links

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build *.egg-info
