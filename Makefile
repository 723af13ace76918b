# make demo   trains on embedded digits and writes runs/demo/report.html
# make test   runs the tests
# make lint   checks format, style and types
# make tables writes the tables of encodings, models and what goes with what, after a method was added
# Each makes .venv and installs what it needs; PYTHON names another interpreter (3.11 to 3.14).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-lowest lint format tables clean

demo: $(VENV)/.installed
	$(BIN)/graticule demo

# Two processes of one thread each: the tests are many and small. A file stays in one, which builds its models once.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/python -m pytest -n 2 --dist loadfile

# Old versions give warnings that newer ones do not, so warnings are no errors here.
test-lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install -c lowest.txt -e ".[demo,text]" datasets pytest pyyaml transformers webdataset
	.venv-lowest/bin/python -m pytest -o filterwarnings=default

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

tables: $(VENV)/.installed
	$(BIN)/python -m graticule.studies.catalog
	$(BIN)/python -m graticule.studies.matrix

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 15) else "graticule needs Python 3.11 to 3.14; say which with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install -e ".[dev]"
	touch $@
