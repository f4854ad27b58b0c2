# Every target makes its own environment in .venv, and brings it up to date when pyproject.toml has changed.

PYTHON ?= python3
# Another torch: make TORCH='torch>=2.10' test, or, for a build that PyPI does not have,
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make TORCH=torch==2.13.0+cpu test
TORCH  ?= torch==2.13.0
# Processes that run the tests: make JOBS=0 test runs them in one, as `python -m pytest` does.
JOBS   ?= logical
# Arguments for what the target runs: make test ARGS="-k codecs"
ARGS   ?=

VENV  := .venv
# The versions that the ranges of the trainers' extras begin with, such as transformers==5.12.
FLOORS := $(shell sed -nE '/^(hf|lightning|accelerate) = /s/>=/==/gp' pyproject.toml | grep -oE '[a-z-]+==[0-9.]+' | sort -u)
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: demo test test-oldest test-peers lint bench clean help

demo: $(STAMP)  ## fine-tune a text classifier with and without DAF, and compare
	$(BIN)/python examples/finetune_text_classifier.py $(ARGS)

test: export OMP_NUM_THREADS ?= 2
test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-oldest:  ## run the tests of the integrations with the oldest trainers that DAF supports, in .venv-oldest
	$(MAKE) test VENV=.venv-oldest WITH='$(FLOORS)' ARGS='$(or $(ARGS),tests/integrations)'

test-peers: $(STAMP)  ## run tests of trainers with DAF and without: ARGS="--accelerate FOLDER", a checkout
	$(BIN)/python -m tests.peers $(ARGS)

lint: $(STAMP)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(STAMP)  ## measure time and memory of training, with DAF and with the usual alternatives
	$(BIN)/daf bench benchmarks/zoo/models.py:roberta_base $(ARGS)

clean:  ## remove build outputs and caches (the environment stays; to be rid of it, delete .venv)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./.venv*/*" -prune -exec rm -rf {} +

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/make \1\t\2/p' Makefile | expand -t 20

# torch comes first, so that the build asked for above is there before anything else could pull in another.
$(STAMP): pyproject.toml
	@test -x $(BIN)/pip || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'DAF needs Python 3.10 or newer, and "$(PYTHON)" is none. Name one: make PYTHON=python3.12 test' >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install '$(TORCH)'
	$(BIN)/python -m pip install -e '.[all]' $(WITH)
	touch $@
