# Set-up and everyday commands; each target builds .venv itself where it is missing or out of date.
PYTHON ?= python3
VENV ?= .venv
# Passed on to `d3d demo`, for example: make demo ARGS=--from-scratch
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
MIN_PYTHON := import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	"d3d_jax needs Python 3.11 or newer: remove $(VENV), if there, and try make PYTHON=python3.12")

# The environment may be one that was made without pip.
define install
@$(BIN)/python -c '$(MIN_PYTHON)'
@echo "Installing d3d_jax into $(VENV); the first time takes minutes."
@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
$(PIP) install -r requirements.txt $(1)
endef

.DELETE_ON_ERROR:
.PHONY: demo test test-fast test-slow lint wheel clean

demo: $(VENV)/.installed
	$(BIN)/d3d demo $(ARGS)

test: lint test-fast

test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "slow and not tpu_compiler and not gpu_compiler and not gpu"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

wheel: $(VENV)/.installed-dev
	rm -rf build
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# A failed `venv` leaves a folder that looks finished, so it is removed again.
$(BIN)/python:
	@$(PYTHON) -c '$(MIN_PYTHON)'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: requirements.txt pyproject.toml | $(BIN)/python
	$(call install,-e .)
	@touch $@

$(VENV)/.installed-dev: requirements.txt pyproject.toml | $(BIN)/python
	$(call install,-e ".[dev]")
	@touch $(VENV)/.installed $@
