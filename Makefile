# MegaTile. `make demo` and `make test` do their own set-up: Python 3.11 or newer with its venv module is all they need,
# and they touch nothing outside of this folder and pip's and the user's cache. Only `make setup-all` and `test-all` do.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed

.PHONY: setup setup-all demo test test-all lint bench golden clean

setup: $(SETUP)

# Installed again whenever the dependencies change.
$(SETUP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# As root: Slurm, MUNGE and Chromium from Debian's packages, for the tests that are skipped without them.
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

# Two processes: one per core of the smallest machine it runs on. What tests leave in the temporary folder goes with them.
PYTEST := tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT INT TERM && \
	TMPDIR=$$tmp OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations 25

# On every edit, in minutes: what needs no process of its own. tests/helpers/lanes.py says what the marks stand for.
# Types and import directions are checked while the tests run: in a fresh clone mypy takes half a minute of one core.
test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@checks=$$(mktemp); { $(BIN)/mypy && $(BIN)/lint-imports; } >$$checks 2>&1 & checking=$$!; \
	$(PYTEST) -m "not (process or slurm or browser or bench or readme or long)"; tested=$$?; \
	wait $$checking; checked=$$?; cat $$checks; rm -f $$checks; exit $$((tested | checked))

# Everything that must hold before a change lands: all tests, whole grids, Slurm and Chromium where they may be installed.
test-all: setup-all lint
	$(PYTEST) --full

# The budget table: what is asked of the project's speed beside what is measured now. Wants an otherwise idle machine.
bench: setup
	$(BIN)/python -m benchmarks.budget

# Write the files of tests/golden/ anew; look at the diff before committing it.
golden: setup
	$(BIN)/python -m tests.golden.regenerate

clean:
	rm -rf $(VENV) runs demo-data bench-data
