# make study    run the micro study and each precision policy once on this machine (about ten minutes on two cores), and the book
# make test     lint, check the templates and run every test
# make cluster  install what studies on Slurm or Kubernetes need beside the environment
# make book     build the book from the published runs and your local ones
# make crosscheck  our quantizers and exports against other packages, in an environment of their own (a quarter of an hour)
# make grading  math-verify alone against our grader, on replies made from the benchmarks' answers (LOWBIT_DATA, or the hub)
# make clean    remove what can be rebuilt; your runs/ and the environment stay
#
# The environment lives in .venv, made once from requirements.lock; `touch requirements.lock` renews it.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHONS ?= python3.11 python3.12 python3
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
# The first of them that runs and is a supported version; a shim that points nowhere does not count.
PYTHON ?= $(firstword $(foreach p,$(PYTHONS),$(shell $(p) -c '$(SUPPORTED)' >/dev/null 2>&1 && echo $(p))))

.DEFAULT_GOAL := help
.PHONY: help install study test book cluster crosscheck grading clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed '/^$$/q'

install: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "This project needs Python 3.11 or 3.12, and none of '$(PYTHONS)' is one;" \
		"install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments because" \
		"its 'ensurepip' module is missing; on Debian and Ubuntu it is in the package python3-venv." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

study: $(STAMP)
	$(BIN)/lowbit study micro
	$(BIN)/lowbit study policies
	$(BIN)/lowbit table
	$(BIN)/lowbit book

test: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lowbit check
	$(BIN)/python -m pytest

book: $(STAMP)
	$(BIN)/lowbit book

cluster: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-cluster.lock

CROSS := .venv-crosscheck
CROSS_FILES := $(addprefix tests/crosscheck/,install.sh requirements.txt requirements-source.txt)

crosscheck: $(CROSS)/.installed
	$(CROSS)/bin/python -m pytest --confcutdir=tests/crosscheck tests/crosscheck
	$(CROSS)/bin/python tests/crosscheck/compare.py

$(CROSS)/.installed: $(CROSS_FILES)
	PYTHON=$(PYTHON) VENV=$(CROSS) sh tests/crosscheck/install.sh
	@touch $@

grading: $(STAMP)
	$(BIN)/python -m helpers.evaluation.graders

clean:
	rm -rf _build build .pytest_cache .ruff_cache .hypothesis
	find src tests notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
