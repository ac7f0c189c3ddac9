# Two commands, each for a fresh clone: `make demo` and `make test`. They need Python 3.11 or newer and make, and keep to
# the virtual environment .venv, which is made once and again when what it is made from changes.

CANDIDATES = python3 python3.14 python3.13 python3.12 python3.11 python
PROBE = import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in $(CANDIDATES); do $$python -c '$(PROBE)' 2>/dev/null && echo $$python && break; done)
INSTALLED = .venv/installed
# Bytecode is written: forty processes of tests would compile our modules anew.
RUN = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv/bin/python -m
BIN = .venv/bin
RUN_VLLM = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv-vllm/bin/python -m

# On a machine with a GPU, whose own Python has torch for it: GPU_PYTHON, PARTS (default: all) and OUT may be given, of
# the documents' blocks also PAGES (default: all), LIMIT in seconds of each and PROCESSES at once.
GPU_PYTHON ?= python3
OUT ?= docs/results/h200
LIMIT ?= 600
PROCESSES ?= 1

# The real SGLang on the CPU, in an environment of its own; its CPU operators are a stand-in of the tests'.
SGLANG = tests/engines/sglang
SGLANG_INSTALLED = .venv-sglang/installed
SGLANG_ENV = PYTHONPATH=$(CURDIR)/$(SGLANG)/stand_ins SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1

.PHONY: demo smoke test test-full test-gluon test-versions test-wheel test-vllm test-vllm-full test-sglang test-sglang-full fuzz test-docs-gpu docs gpu-results

demo: $(INSTALLED)  ## speculative decoding on real text, through every backend, eagerly and through graphs
	OMP_NUM_THREADS=1 $(BIN)/attn-backends demo

smoke: $(INSTALLED)  ## the quick tests' quickest part, in a minute
	$(RUN) pytest -m smoke
	@$(RUN) tests.doc_blocks

test: $(INSTALLED)  ## formatting, lint, types, tests, and half a minute of random batches
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(RUN) pytest -n 2
	$(RUN) tests.fuzz --seconds 30 --processes 2
	@$(RUN) tests.doc_blocks

test-full: $(INSTALLED)  ## the whole crosses, and what takes long
	$(RUN) pytest -n 2 -m full

fuzz: $(INSTALLED)  ## N random batches against a model of what each row sees and writes
	$(RUN) tests.fuzz $(if $(N),--batches $(N),--seconds 60) --processes 2

test-gluon: $(INSTALLED)  ## every Gluon kernel compiled for Hopper without a GPU, and its waits left out one by one
	$(RUN) pytest -n 2 -m "full or not full" tests/test_gluon.py tests/test_gluon_model.py

test-versions: $(INSTALLED)  ## smoke and models' tests with the oldest and newest versions of what we use; or those of ROWS
	$(RUN) tests.versions $(ROWS)

test-wheel: $(INSTALLED)  ## the built wheels, in an environment of their own in an empty folder: the library alone, then both
	$(RUN) pytest -m install
	wheel=$$(mktemp -d) && $(PYTHON) -m venv $$wheel/venv \
	&& $$wheel/venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir $$wheel . && cd $$wheel \
	&& venv/bin/python -m pip install --quiet --constraint $(CURDIR)/requirements-cpu.txt *.whl \
	&& venv/bin/attn-backends list && venv/bin/attn-backends conformance fa3 --kernel torch --quick \
	&& $$wheel/venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir $$wheel/reference $(CURDIR)/reference \
	&& venv/bin/python -m pip install --quiet --constraint $(CURDIR)/requirements-cpu.txt reference/*.whl \
	&& venv/bin/attn-backends generate --prompt "import os" --max-new-tokens 8 \
	&& rm -r $$wheel

test-vllm: .venv-vllm/installed  ## vLLM's real engine on this CPU with our backends inside, in its own environment
	$(RUN_VLLM) pytest -n 2 tests/engines/vllm

test-vllm-full: .venv-vllm/installed  ## the same on every model, backend, graph mode and way of caching: hours, resumable
	$(RUN_VLLM) pytest tests/engines/vllm -m full
	$(RUN_VLLM) tests.engines.vllm.full --json build/vllm_full.json

test-sglang: $(SGLANG_INSTALLED)  ## SGLang's engine on our backends, without a GPU
	$(SGLANG_ENV) .venv-sglang/bin/python -m pytest $(SGLANG)

test-sglang-full: $(SGLANG_INSTALLED)  ## the rest of its cases, such as every format of published heads
	$(SGLANG_ENV) .venv-sglang/bin/python -m pytest $(SGLANG) -m full

docs: .venv-docs/installed  ## the site in build/site; a link, an anchor or a name that does not exist fails it
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet

gpu-results:  ## conformance, demo, benchmark, memcheck and graph mutants on a GPU, resumable
	PYTHONPATH=.:reference:$$PYTHONPATH $(GPU_PYTHON) -m tests.gpu_results --out $(OUT) $(PARTS)

test-docs-gpu:  ## every block of the documents that needs a GPU, and what came of each into OUT/doc_blocks.json
	PYTHONPATH=.:reference:$$PYTHONPATH $(GPU_PYTHON) -m tests.doc_gpu --json $(OUT)/doc_blocks.json \
	--processes $(PROCESSES) --limit $(LIMIT) $(PAGES)

$(INSTALLED): pyproject.toml reference/pyproject.toml requirements-cpu.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with venv is needed; name it by PYTHON=/path/to/python"; exit 1; }
	@echo "installing torch and the rest into .venv, once: some minutes, without a word"
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --constraint requirements-cpu.txt --editable '.[test]' --editable ./reference
	@touch $@

.venv-vllm/installed: $(INSTALLED) tests/engines/vllm/requirements.txt tests/engines/vllm/install.sh
	bash tests/engines/vllm/install.sh .venv
	@touch $@

$(SGLANG_INSTALLED): pyproject.toml $(SGLANG)/requirements.txt $(SGLANG)/sglang.txt
	$(PYTHON) -m venv --clear .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --requirement $(SGLANG)/requirements.txt
	.venv-sglang/bin/python -m pip install --quiet --no-deps --requirement $(SGLANG)/sglang.txt --editable .
	@touch $@

.venv-docs/installed: requirements-docs.txt
	$(PYTHON) -m venv --clear .venv-docs
	.venv-docs/bin/python -m pip install --quiet --requirement requirements-docs.txt
	@touch $@
