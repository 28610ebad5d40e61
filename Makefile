# make quickstart   install into .venv, run the built-in experiment, name its report
# make test         install into .venv, run the tests
# make lint         style and types
# make soak         kill runs a hundred times, and see that nothing is lost; some minutes
# make golden       after an epoch was raised: write down anew what every kind of stage makes
.DEFAULT_GOAL := quickstart
.PHONY: quickstart test lint soak golden install clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Idle OpenMP threads sleep: spinning ones slow two processes side by side many times over.
export OMP_WAIT_POLICY := PASSIVE

quickstart: install
	$(BIN)/testbed run quickstart

test: $(VENV)/.tested
	$(BIN)/python -m pytest --durations=15

soak: $(VENV)/.tested
	$(BIN)/python tests/soak.py --kills 100

golden: $(VENV)/.tested
	$(BIN)/python tests/fingerprints.py

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/mypy

install: $(VENV)/.installed

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# Stamps: each install runs once, and again when what it reads has changed.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "Python 3.11 or newer is needed, and $(PYTHON) is `$(PYTHON) --version 2>&1`." \
	  "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo \
	  "$(PYTHON) cannot create virtual environments: install its venv package (Debian: apt install python3-venv)." \
	  >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.created
	@echo "Installing into $(VENV); the first time this takes some minutes."
	$(PIP) --editable .
	@touch $@

# torch's CUDA build brings the Triton it was built with. Its CPU build brings none, and the kernels' tests need one.
$(VENV)/.tested: $(VENV)/.installed
	$(PIP) --editable '.[test]' $$($(BIN)/python -c 'import sys, torch; \
	  print("triton==3.6.0" if sys.platform == "linux" and not torch.version.cuda else "")')
	@touch $@
