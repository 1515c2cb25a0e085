# Set-up and everyday commands; each target builds .venv itself where it is missing or out of date.
PYTHON ?= python3
VENV ?= .venv
# Passed on to pytest by test-slow and the compile targets.
PYTEST_ARGS ?=
# The Python of `make gpu-check`.
GPU_PYTHON ?= $(VENV)/bin/python
# Passed on to `d3d demo`, for example: make demo ARGS=--from-scratch
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
MIN_PYTHON := import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	"d3d_jax needs Python 3.11 or newer: remove $(VENV), if there, and try make PYTHON=python3.12")

LIBTPU := from importlib.metadata import requires; \
	print(next(r.split(";")[0] for r in requires("jax") if r.startswith("libtpu")))

# The environment may be one that was made without pip.
define install
@$(BIN)/python -c '$(MIN_PYTHON)'
@echo "Installing d3d_jax into $(VENV); the first time takes minutes."
@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
$(PIP) install -r requirements.txt $(1)
endef

.DELETE_ON_ERROR:
.PHONY: demo test test-fast test-slow compile-tpu compile-gpu gpu-check lint wheel clean

demo: $(VENV)/.installed
	$(BIN)/d3d demo $(ARGS)

test: lint test-fast

# Two processes: most of the time goes into compiling, which uses one core. A file stays in one of
# them, for what its tests share.
test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile \
		-m "slow and not tpu_compiler and not gpu_compiler and not gpu" $(PYTEST_ARGS)

# The compilers of TPUs and NVIDIA GPUs, which need neither. They lie beside the environment and not
# in it: a jax that finds them looks for the hardware in every other test.
compile-tpu: $(VENV)/tpu-compiler/.installed
	JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 PYTHONPATH=$(VENV)/tpu-compiler \
		$(BIN)/python -m pytest -m tpu_compiler $(PYTEST_ARGS)

compile-gpu: $(VENV)/gpu-compiler/.installed
	JAX_PLATFORMS=cpu PYTHONPATH=$(VENV)/gpu-compiler \
		$(BIN)/python -m pytest -m gpu_compiler $(PYTEST_ARGS)

# On a machine with a GPU and a jax that uses it (extra cuda13): parity, then times, into results/.
gpu-check:
	JAX_PLATFORMS=cuda $(GPU_PYTHON) -m pytest -m gpu tests/kernels
	$(GPU_PYTHON) -m d3d_jax.kernels.interval_attention.bench \
		--shapes train/ decode/qwen3-8b --out results/bench-attention-gpu.json

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

# As versions go with the jax that is installed.
$(VENV)/tpu-compiler/.installed: | $(VENV)/.installed-dev
	$(PIP) install --no-deps --target $(@D) "$$($(BIN)/python -c '$(LIBTPU)')"
	@touch $@

$(VENV)/gpu-compiler/.installed: | $(VENV)/.installed-dev
	version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)'); \
		$(PIP) install --no-deps --target $(@D) \
		jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	@touch $@
