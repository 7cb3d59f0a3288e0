# `make demo` trains, evaluates, exports and serves; `make test` tests, `make test-long` the
# rest. The first time, each installs what it needs into .venv, with pinned versions.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

# An NVIDIA GPU takes the CUDA build; TensorFlow has no CPU-only build for macOS.
BACKEND := $(shell \
	if nvidia-smi -L >/dev/null 2>&1; then echo tensorflow-cuda; \
	elif [ "$$(uname -s)" = Darwin ]; then echo tensorflow; \
	else echo tensorflow-cpu; fi)

# What .venv holds, each with the extras of pyproject.toml below: more hold less too.
MADE := $(VENV)/.made
RUNTIME := $(VENV)/.installed-$(BACKEND)
TEST := $(VENV)/.installed-test
DEV := $(VENV)/.installed-dev

# Two processes; the one that is done first takes over tests of the other.
PYTEST := -m pytest --numprocesses=2 --dist=worksteal
TESTS := tests examples/tests experiments/tests
# The folder of tensorflow-datasets' prepared copies, for examples on real images.
DATA := $(NSL_KERAS_DATA_DIR)

# All targets install into one environment, which pip must change alone, with `make -j` too.
.NOTPARALLEL:

.PHONY: setup demo test test-long test-oldest test-newest lint docs bench packages

setup: $(DEV)

# One seed of four models; `$(PY) -m experiments.demo` trains eight, with three seeds.
demo: $(RUNTIME)
	$(PY) -m experiments.demo --seeds=1 --model=plain --model=neighborhoods \
		--model=linear --model=linear_neighborhoods --verbose=0

test: $(TEST)
	$(PY) $(PYTEST) -m "not long"

# The examples and their tables, notebooks, documentation, other processes and devices, JAX.
# A third process has what the others leave while they wait for servers and for workers.
test-long: $(DEV)
	$(if $(DATA),NSL_KERAS_DATA_DIR=$(abspath $(DATA))) \
		$(PY) $(PYTEST) --numprocesses=3 -m long $(TESTS)
	KERAS_BACKEND=jax $(PY) $(PYTEST) -m jax

# The tests of `make test` and of JAX with the lowest and the latest versions of the metadata,
# each in an environment of its own. What old versions warn about is no error there, and not
# every version knows the tests' flags of XLA.
test-oldest test-newest: test-%:
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check \
		-r requirements/$*.txt
	XLA_FLAGS= .venv-$*/bin/python $(PYTEST) -W default -m "not long"
	XLA_FLAGS= KERAS_BACKEND=jax .venv-$*/bin/python $(PYTEST) -W default -m jax

lint: $(TEST)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The documentation, at http://localhost:8000 until it is interrupted.
docs: $(DEV)
	$(PY) -m tools.documentation
	$(PY) -m zensical serve

bench: $(RUNTIME)
	$(PY) -m experiments.speed

# Wheel and source distribution, each tried in an empty environment of each interpreter.
PYTHONS ?= $(PYTHON)
packages:
	$(PYTHON) tools/packages.py --keep=dist $(addprefix --python=,$(PYTHONS))

$(MADE): pyproject.toml requirements/constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	sys.exit(None if (3, 11) <= v <= (3, 13) else \
	"nsl_keras needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d: " % v + \
	"name another with PYTHON=...")'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(RUNTIME): EXTRAS := demo
$(TEST): EXTRAS := demo,test
$(TEST): HELD := $(RUNTIME)
$(DEV): EXTRAS := demo,dev
$(DEV): HELD := $(RUNTIME) $(TEST)

# pip would compile in one process, and the tests of all packages too. Some packages hold
# templates that do not compile, which fails here and harms nothing.
$(RUNTIME) $(TEST) $(DEV): $(MADE)
	@echo "Installing $(BACKEND),$(EXTRAS) in $(VENV): a minute or more, the first time only."
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint=requirements/constraints.txt --editable ".[$(BACKEND),$(EXTRAS)]"
	@$(PY) -m compileall -qq --workers=0 -x /tests/ $(VENV)/lib || true
	@touch $(HELD) $@
