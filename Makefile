# Two commands do everything from a bare clone: `make demo` and `make test`. `make check` is what CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo
unexport PYTHONDONTWRITEBYTECODE  # without bytecode each of the tests' many processes compiles the library anew

.PHONY: setup docs-setup parity demo test coverage proofs steady mutants newest stack compilers accelerator check lint format docs tutorial bench clean

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
	$(BIN)/tformer train --config=configs/g2p.py:demo --config.train.num_steps=1500 --workdir=$(DEMO)
	$(BIN)/tformer attention --workdir=$(DEMO) transformer

test: setup parity
	$(BIN)/python -m pytest -n 2 -m 'not slow'

# All tests but proofs, with a list of the lines and branches of tformer that they do not run in their own processes.
coverage: parity $(VENV)/.coverage
	$(BIN)/python -m pytest -n 2 -m 'not proof' --cov --cov-report=term-missing:skip-covered

$(VENV)/.coverage: $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check 'pytest-cov>=7'
	touch $@

# The same over every family, mesh and fault: hours.
proofs: setup parity
	$(BIN)/python -m pytest -n 2 -m proof

# Every test that sends a signal or kills, TIMES times, and such proofs a tenth as often, on busy cores.
TIMES ?= 30
steady: setup
	$(BIN)/python tests/helpers/steady.py $(TIMES)

# Hundreds of small wrong edits to the library, each against the tests that should notice.
mutants: setup
	$(BIN)/python tests/mutants/run.py

# Chosen tests on the newest Python of this machine: a program of each strategy, family and command.
newest:
	@newest=$$($(PYTHON) tests/helpers/newest_python.py) && if [ -z "$$newest" ]; then \
	  echo 'newest: no newer Python here'; else $(MAKE) --no-print-directory stack PYTHON="$$newest" VENV=.venv-newest; fi

stack: setup
	$(BIN)/python -m pytest -n 2 -m stack

# Lint, types, the site, the newest Python, then all tests, of proofs every eighth of each file, in one run of pytest,
# whose closing line comes last. `make proofs` runs all proofs. Where the compilers of accelerators cannot be had, tests
# that need them are skipped.
check: lint docs newest parity
	@$(MAKE) --no-print-directory compilers || echo 'the compilers of accelerators could not be installed anew'
	$(BIN)/python -m pytest -n 2 --sample=8

# The compilers of TPUs and GPUs, which need none of them, in a folder that `tformer inspect --device` and `plan` know.
COMPILERS := build/compilers
compilers: setup
	for platform in tpu cuda cudnn; do \
	  $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target=$(COMPILERS)/$$platform --upgrade \
	    $$($(BIN)/python -c "from tformer.distributed import devices; print(*devices.requirements('$$platform'))") \
	    || exit 1; done

# For whoever has a TPU or a GPU: the tests marked `accelerator`, then the timings, by an interpreter whose JAX has its
# plugin. Nothing is installed. TFORMER_ACCELERATOR=cpu rehearses it on a CPU.
TFORMER_ACCELERATOR ?= chip
accelerator: export TFORMER_ACCELERATOR := $(TFORMER_ACCELERATOR)
accelerator: export PYTHONPATH := .$(if $(PYTHONPATH),:$(PYTHONPATH))
accelerator:
	@processes=$$($(PYTHON) tests/helpers/accelerator.py) || exit 2; failed=0; \
	$(PYTHON) -m pytest -o addopts= -q -rs --strict-markers --import-mode=importlib -W default -W ignore::ResourceWarning \
	  -p no:cacheprovider --durations=10 $$processes -m accelerator tests/accelerator || failed=1; \
	$(PYTHON) tests/accelerator/timings.py --table=build/accelerator.md \
	  $(if $(filter cpu,$(TFORMER_ACCELERATOR)),--tiny) || failed=1; \
	exit $$failed

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs-setup: $(VENV)/.docs

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

# The site, in build/site; a broken link is an error.
docs: docs-setup
	JAX_PLATFORMS=cpu NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

# Runs the tutorial's cells again and stores their outputs in it.
tutorial: docs-setup
	JAX_PLATFORMS=cpu $(BIN)/jupyter execute --inplace docs/tutorial.ipynb

bench: setup
	$(BIN)/tformer benchmark --config=configs/lm_stdlib.py
	$(BIN)/tformer benchmark --config=configs/g2p.py

clean:
	rm -rf $(VENV) .venv-newest .coverage build runs
