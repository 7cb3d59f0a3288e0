# Two commands: `make demo` trains, evaluates, exports and serves; `make test` tests.
# Each makes .venv with pinned versions the first time, and starts at once after that.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

# An NVIDIA GPU takes the CUDA build; TensorFlow has no CPU-only build for macOS.
BACKEND := $(shell \
	if nvidia-smi -L >/dev/null 2>&1; then echo tensorflow-cuda; \
	elif [ "$$(uname -s)" = Darwin ]; then echo tensorflow; \
	else echo tensorflow-cpu; fi)
INSTALLED := $(VENV)/.installed-$(BACKEND)

# Two processes; the one that is done first takes over tests of the other.
PYTEST := $(PY) -m pytest --numprocesses=2 --dist=worksteal
# What the JAX backend is tested with: every layer, the golden numbers, and that folded
# layers share no buffers, which only JAX gives away in training. (The suite
# trains the model under JAX, without TensorFlow, in tests/test_backend.py.)
JAX_TESTS := tests/test_layers.py::test_layer tests/similarity/test_golden.py \
	tests/similarity/test_convolution.py::test_fold_and_layer_are_independent_in_training \
	tests/neighborhoods/test_golden.py

.PHONY: demo test test-data lint bench results tune setup

demo: $(INSTALLED)
	$(PY) -m examples.demo --dataset=digits --output_dir=.
	$(PY) -m results.tables

test: $(INSTALLED)
	$(PYTEST) -m "not data"
	KERAS_BACKEND=jax $(PYTEST) $(JAX_TESTS)

# Tests on real image sets; NSL_KERAS_DATA_DIR names the folder of prepared copies.
test-data: $(INSTALLED)
	$(PYTEST) -m data tests/examples

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(INSTALLED)
	$(PY) -m benchmarks.run --output_dir=results/benchmarks

# The hyper-parameters of the demo, on its validation images.
tune: $(INSTALLED)
	$(PY) -m examples.demo --dataset=digits --tune --output_dir=.

# The tables of results/README.md and README.md, from the JSON files.
results: $(INSTALLED)
	$(PY) -m results.tables

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	sys.exit(None if (3, 11) <= v <= (3, 13) else \
	"nsl_keras needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d: " % v + \
	"name another with PYTHON=...")'
	@echo "Setting up $(VENV) with $(BACKEND): some minutes, the first time only."
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check \
		-r requirements/$(BACKEND).txt
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@
