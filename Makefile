# MegaTile. `make demo` and `make test` run the set-up first. They need only Python 3.11 or newer with its venv module,
# and write only to this folder and to the caches of pip and the user. Only `make setup-all` and `test-all` write elsewhere.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed

.PHONY: setup setup-all demo test test-all lint bench golden clean

setup: $(SETUP)

# Install again when the dependencies change. For another Python: make demo PYTHON=python3.12. What an unfinished set-up
# left is removed, because venv keeps its links to the other Python; a finished one may be in use, and is updated.
$(SETUP): pyproject.toml
	$(PYTHON) -m venv $(VENV) $(if $(wildcard $@),,--clear)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# Install, as root, Debian's packages of Slurm, MUNGE and Chromium. Tests that need a missing one are skipped.
setup-all: setup
	tools/system_packages.sh

demo: setup
	$(BIN)/python demo/run.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy -p benchmarks
	$(BIN)/lint-imports

# Two workers: one per core of the smallest machine in use. The temporary folder of the tests is removed afterwards.
PYTEST := tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT INT TERM && \
	TMPDIR=$$tmp OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations 25

# For every edit, in minutes: tests that start no process. tests/helpers/lanes.py explains the marks. Types and import
# directions are checked while the tests run, because mypy takes half a minute of one core in a fresh clone.
test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@checks=$$(mktemp); { $(BIN)/mypy && $(BIN)/lint-imports; } >$$checks 2>&1 & checking=$$!; \
	$(PYTEST) -m "not (process or slurm or browser or bench or readme or long)"; tested=$$?; \
	wait $$checking; checked=$$?; cat $$checks; rm -f $$checks; exit $$((tested | checked))

# Before a change lands: all tests, with Slurm and Chromium where they may be installed.
test-all: setup-all lint
	$(PYTEST) --full

# Table of speed budgets: required and measured now. Needs an otherwise idle machine.
bench: setup
	$(BIN)/python -m benchmarks.budget

# Regenerate the files of tests/golden/; read the diff before you commit it.
golden: setup
	$(BIN)/python -m tests.golden.regenerate

clean:
	rm -rf $(VENV) runs demo-data bench-data
