# `make demo` trains, evaluates, exports and serves; `make test` tests, `make test-long` the
# rest. Each makes .venv with pinned versions the first time, and starts at once after that.

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
# The folder of tensorflow-datasets' prepared copies, for examples on real images.
DATA := $(NSL_KERAS_DATA_DIR)

.PHONY: demo docs test test-long test-examples test-oldest test-newest packages lint bench no-harm load \
	export-kills kills fuzz notebooks results tune setup

demo: $(INSTALLED)
	$(PY) -m examples.demo --dataset=digits

test: $(INSTALLED)
	$(PYTEST) -m "not long"

# Notebooks, documentation, other processes and devices, JAX, and the examples.
test-long: $(INSTALLED) test-examples
	$(PYTEST) -m long
	KERAS_BACKEND=jax $(PYTEST) -m jax

# The commands of examples/ and benchmarks/, their tables, and what saved_models/ answer.
test-examples: $(INSTALLED)
	$(if $(DATA),NSL_KERAS_DATA_DIR=$(abspath $(DATA))) $(PYTEST) examples/tests

# The same tests as `make test` with the lowest and with the latest versions of the metadata,
# each in an environment of its own. What old versions warn about is no error there.
test-oldest test-newest: test-%:
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check \
		-r requirements/$*.txt
	.venv-$*/bin/python -m pytest --numprocesses=2 --dist=worksteal -W default \
		-m "not long"

# Wheel and source distribution, each tried in an empty environment of each interpreter.
PYTHONS ?= $(PYTHON)
packages:
	$(PYTHON) tests/release/packages.py --keep=dist $(addprefix --python=,$(PYTHONS))

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(INSTALLED)
	$(PY) -m benchmarks.run

# Every method, used naively, against the plain network: some ten hours on one core, and
# more where seeds scatter. What is trained already stays; `--help` names fewer cells and
# shares for several processes.
no-harm: $(INSTALLED)
	$(PY) -m benchmarks.no_harm $(if $(DATA),--data_dir=$(abspath $(DATA)))
	$(PY) -m benchmarks.no_harm $(if $(DATA),--data_dir=$(abspath $(DATA))) \
		--batch_norm=unbiased
	$(PY) -m benchmarks.no_harm --report

# Ten thousand requests to a server on this machine; needs the extra `serving`.
load: $(INSTALLED)
	$(PY) -m examples.serving.load

# Fifty exports, killed at random moments.
export-kills: $(INSTALLED)
	$(PY) -m examples.serving.export_kills

# Examples that are killed, at random moments and inside each write, must end as if nothing
# had happened: about an hour on two cores.
kills: $(INSTALLED)
	$(PY) -m benchmarks.kills

# Malformed arguments, calls and files, as in the tests but more of them, others each time.
fuzz: $(INSTALLED)
	NSL_KERAS_FUZZ=5000 $(PY) -m pytest tests/test_fuzz.py --timeout=3600

# The hyper-parameters of the demo, on its validation images.
tune: $(INSTALLED)
	$(PY) -m examples.demo --dataset=digits --tune

# The tables of results/README.md, README.md and docs/, from the files in results/.
results: $(INSTALLED)
	$(PY) -m examples.tables

# The documentation, at http://localhost:8000 until it is interrupted.
docs: $(INSTALLED)
	$(PY) -m examples.documentation
	$(PY) -m zensical serve

# Runs all notebooks again, and stores what they show: some ten minutes.
notebooks: $(INSTALLED)
	JUPYTER_PREFER_ENV_PATH=1 $(PY) -m examples.documentation.notebooks

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
