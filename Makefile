# Each target makes and fills its own virtual environment from a clean clone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench asan clean
.DEFAULT_GOAL := test

$(VENV)/ready: pyproject.toml constraints.txt CMakeLists.txt $(wildcard elsa_format/*.c elsa_format/native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/ready  ## train, pack, stream, export and run a nested network on the digits
	$(BIN)/python examples/demo.py

test: $(VENV)/ready  ## the whole suite, then the parts that touch bits once more without the C module
	$(BIN)/python -m pytest -n 2 --dist loadfile
	ELSA_PURE_PYTHON=1 $(BIN)/python -m pytest -q -n 2 tests/unit tests/property tests/conformance

lint: $(VENV)/ready  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/ready  ## measure, and write docs/benchmarks.md
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build demo-out .cache
