# MegaTile. `make demo` and `make test` do their own set-up: Python 3.11 or newer with its venv module is all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed

.PHONY: setup demo test lint bench golden clean

setup: $(SETUP)

# Installed again whenever the dependencies change. System packages only where it may: see there.
$(SETUP): pyproject.toml tools/system_packages.sh
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[dev]'
	tools/system_packages.sh
	touch $@

demo: setup
	$(BIN)/python demo/run.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Everything that must hold before a change lands. Two processes: one per core of the smallest machine it runs on.
test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 25

# The budget table: what is asked of the project's speed beside what is measured now. Wants an otherwise idle machine.
bench: setup
	$(BIN)/python -m benchmarks.budget

# Write the files of tests/golden/ anew; look at the diff before committing it.
golden: setup
	$(BIN)/python -m tests.golden.regenerate

clean:
	rm -rf $(VENV) runs demo-data bench-data
