# Two commands do everything from a bare clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo

.PHONY: setup demo test lint format bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

demo: setup
	rm -rf $(DEMO)
	$(BIN)/tformer train --config=configs/g2p.py:demo --workdir=$(DEMO)
	$(BIN)/tformer attention --workdir=$(DEMO) transformer

test: setup
	$(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/tformer benchmark --config=configs/lm_stdlib.py
	$(BIN)/tformer benchmark --config=configs/g2p.py

clean:
	rm -rf $(VENV) runs
