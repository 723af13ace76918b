# make demo   trains on embedded digits and writes runs/demo/report.html
# make test   runs the tests
# make test-long  runs the tests that take more than a second (tests/long.txt)
# make test-slow  runs the tests that take some seconds each, tests of devices, and ten times as many cases of the
#               fuzzing tests
# make test-gpu  runs the tests of devices alone, on the GPU if there is one, otherwise on the CPU
# make lint   checks format, style and types
# make wheel  builds the package, installs it in an environment without this folder, and runs its demo
# make dist   builds wheel and source distribution into dist/ and checks the description for the package index
# make release checks that a release could be made: dist, docs, and version, changelog and artifacts (CONTRIBUTING.md)
# make docs   builds the site into docs/_build/html, checks its links and runs its slow examples
# make tables writes the tables of encodings, models and their compatibility, after a method was added
# Each makes .venv and installs what it needs; PYTHON names another interpreter (3.11 to 3.14).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-long test-slow test-gpu test-lowest wheel dist release docs lint format tables clean

demo: $(VENV)/.lab
	$(BIN)/graticule demo

# Two processes of one thread each, since the tests are many and small. Each process gets half of them, in order, so that
# most files build their models once; the process that finishes first takes half of the remaining tests of the other.
# Python writes compiled files; otherwise each process that a test starts would compile the package again.
test: $(VENV)/.dev
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/python -m pytest -n 2 --dist worksteal --durations=30

test-long: $(VENV)/.dev
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'long and not slow and not gpu'

test-slow: $(VENV)/.dev
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'slow or gpu'
	OMP_NUM_THREADS=1 GRATICULE_FUZZ=10 $(BIN)/python -m pytest -q tests/test_fuzz_data.py tests/test_fuzz_models.py tests/test_fuzz_runs.py

# With as many processes as PROCESSES: they share the GPU, and most of the time is PyTorch's on the CPU.
PROCESSES ?= 2
test-gpu: $(VENV)/.dev
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/python -m pytest -m gpu tests/gpu -n $(PROCESSES) --dist worksteal

# Old versions emit warnings that newer ones do not, so warnings are not errors here.
test-lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install -c lowest.txt -e ".[dask,datasets,export,lab]" diffusers hypothesis pytest pyyaml transformers
	.venv-lowest/bin/python -m pytest -o filterwarnings=default

# The new environment finds the dependencies in $(VENV) by a .pth file, since PyTorch alone is gigabytes; it does not
# include the editable install there. Tested in another folder, so that only the wheel can be imported.
wheel: $(VENV)/.dev
	rm -rf .venv-wheel
	$(BIN)/python -m venv --without-pip .venv-wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir .venv-wheel/dist .
	$(BIN)/python -m pip --python .venv-wheel/bin/python install --quiet --no-deps .venv-wheel/dist/*.whl
	$(BIN)/python -c 'import sysconfig as s; print(s.get_path("purelib"))' > "$$(.venv-wheel/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/dependencies.pth"
	cd .venv-wheel && bin/python -c 'import graticule as g, sys; assert g.__file__.startswith(sys.prefix), g.__file__'
	cd .venv-wheel && bin/graticule demo --quick --seeds 0 --output demo && test -s demo/report.html

dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m pip install --quiet build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

release: dist docs
	$(BIN)/python .ci/release.py

# Warnings are errors. The pages of encodings, commands and the API are rewritten each time.
docs: $(VENV)/.docs
	rm -rf docs/_build docs/gallery docs/api docs/commands
	$(BIN)/python -m sphinx -W --keep-going -q -j 2 -b html docs docs/_build/html
	$(BIN)/python -m pytest -q docs/_ext

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

tables: $(VENV)/.dev
	$(BIN)/python -m evidence.names

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-wheel .pytest_cache .mypy_cache .ruff_cache docs/_build docs/gallery docs/api docs/commands

# One stamp per installed extra, so that `make demo` installs no tools of developers, and downloads nothing after `make test`.
$(VENV)/.lab $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(VENV)/.python
	$(BIN)/python -m pip install -e ".[$*]"
	touch $@

$(VENV)/.docs: $(VENV)/.dev

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 15) else "graticule needs Python 3.11 to 3.14; say which with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	touch $@
