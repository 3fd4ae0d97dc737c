# Two commands do everything from a bare clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo

.PHONY: setup parity demo test proofs lint format bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

# Weights against another implementation, where a CPU build of torch is at hand; elsewhere stored arrays prove the same.
parity: $(VENV)/.parity

$(VENV)/.parity: $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check 'torch==2.13.0+cpu' 'transformers>=5' \
	  || echo 'no CPU build of torch here: parity is tested on the stored arrays alone'
	touch $@

demo: setup
	rm -rf $(DEMO)
	$(BIN)/tformer train --config=configs/g2p.py:demo --workdir=$(DEMO)
	$(BIN)/tformer attention --workdir=$(DEMO) transformer

test: setup parity
	$(BIN)/python -m pytest -n 2 -m 'not slow'

# The same proofs over every family, mesh and fault: half an hour more.
proofs: setup parity
	$(BIN)/python -m pytest -n 2 -m slow

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
