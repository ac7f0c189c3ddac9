# Two commands, each for a fresh clone: `make demo` and `make test`. They need Python 3.11 or newer and make, and keep to
# the virtual environment .venv, which is made once and again when what it is made from changes.

CANDIDATES = python3 python3.14 python3.13 python3.12 python3.11 python
PROBE = import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in $(CANDIDATES); do $$python -c '$(PROBE)' 2>/dev/null && echo $$python && break; done)
INSTALLED = .venv/installed
RUN = OMP_NUM_THREADS=1 .venv/bin/python -m
BIN = .venv/bin

# On a machine with a GPU, whose own Python has torch for it: GPU_PYTHON, PARTS (default: all) and OUT may be given.
GPU_PYTHON ?= python3
OUT ?= docs/results/h200

.PHONY: demo test test-full fuzz gpu-results

demo: $(INSTALLED)  ## speculative decoding on real text, through every backend, eagerly and through graphs
	OMP_NUM_THREADS=1 $(BIN)/attn-backends demo

test: $(INSTALLED)  ## formatting, lint, types and tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(RUN) pytest -n 2

test-full: $(INSTALLED)  ## the whole crosses
	$(RUN) pytest -n 2 -m full

fuzz: $(INSTALLED)  ## N random batches against a model of what each row sees and writes
	$(RUN) tests.fuzz $(if $(N),--batches $(N),--seconds 60) --processes 2

gpu-results:  ## conformance, demo, benchmark, memcheck and graph mutants on a GPU, resumable
	PYTHONPATH=.:$$PYTHONPATH $(GPU_PYTHON) -m tests.gpu.results --out $(OUT) $(PARTS)

$(INSTALLED): pyproject.toml requirements-cpu.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with venv is needed; name it by PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --constraint requirements-cpu.txt --editable '.[models,test]'
	@touch $@
