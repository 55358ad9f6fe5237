# `make demo` trains, `make test` tests. Both set up `.venv` first if it is missing.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Largest number of test processes; one per core by default. To debug: ARGS="-n 0 --pdb".
WORKERS ?= 4
# Extra words for pip, e.g. PIP_ARGS="--extra-index-url URL-OF-A-CUDA-BUILD" (see docs/use/train.md).
PIP_ARGS ?=
# How many cases `make fuzz` runs.
N ?= 500

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format contract guides parity cuda families sweep fuzz fuzz-data pictures plan-check slurm faults adversary chaos bench-harness bench-pipeline bench-data bench-order bench-convert bench-precision bench-checkpoint bench-gpu bench-gpu-page bench-cpu bench-host clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Pentatron needs Python 3.11 or newer; '$(PYTHON)' is older. Try: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing the pinned versions of requirements.lock (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

setup: $(READY) ## create .venv with the pinned versions

demo: $(READY) ## train a small model on this machine in a few minutes
	@$(BIN)/pentatron train $(ARGS)

test: $(READY) ## run the test suite
	@# Empty: bytecode is kept. Without it every rank of every test would compile its module anew, asserts rewritten.
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --maxprocesses $(WORKERS) --dist worksteal $(ARGS)

check: $(READY) ## check format, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(READY) ## format the code and apply the linter's fixes
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

contract: $(READY) ## run the evidence of each contract item and write docs/contract.md
	@$(BIN)/python scripts/contract.py

guides: $(READY) ## run every command of the five guides in small form, write docs/guides/README.md; ARGS="--only 002"
	@$(BIN)/python scripts/guides.py $(ARGS)

families: $(READY) ## compare every model family with transformers, write docs/families.md; ARGS="--only qwen3"
	@$(BIN)/python scripts/families.py $(ARGS)

parity: $(READY) ## compare every layout with one process, write docs/parity.md; ARGS="--only tp2"
	@$(BIN)/python scripts/parity.py $(ARGS)

cuda: $(READY) ## on a GPU: compare families, layouts and runs with their references; ARGS=--write renews docs/cuda.md
	@$(BIN)/python scripts/on_gpu.py $(ARGS)

sweep: $(READY) ## run the cases of longer series that make test leaves out
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --maxprocesses $(WORKERS) --dist worksteal -m sweep $(ARGS)

fuzz: $(READY) ## compare N (500) random models in random layouts with one process; ARGS="--seed 2 --minutes 10 --only zbv"
	@$(BIN)/python scripts/fuzz.py --cases $(N) $(ARGS)

fuzz-data: $(READY) ## damage N (10000) random data files: no wrong token, no crash
	@$(BIN)/python scripts/fuzz_data.py --cases $(if $(filter file,$(origin N)),10000,$(N)) $(ARGS)

pictures: $(READY) ## renew the pictures of docs/ from schedules, grids, layouts and results
	@$(BIN)/python scripts/draw_pictures.py
	@$(BIN)/python scripts/draw_layouts.py

slurm: $(READY) ## test the written Slurm scripts on a Slurm of two nodes on this machine
	@$(BIN)/python scripts/slurm_trial.py

faults: $(READY) ## inject faults into processes and files, write docs/faults.md; ARGS="--only storage"
	@$(BIN)/python scripts/faults.py $(ARGS)

adversary: $(READY) ## run trials with failing disks, power cuts, hostile files and lost output; ARGS="--seed 1 2 3"
	@$(BIN)/python scripts/adversary.py $(ARGS)

chaos: $(READY) ## kill ranks and launcher of one TP2×PP2×DP2 run N (50) times: equal final state; ARGS="--seed 2"
	@$(BIN)/python scripts/chaos.py --kills $(if $(filter file,$(origin N)),50,$(N)) $(ARGS)

plan-check: $(READY) ## compare bytes of pentatron plan with real steps in 29 layouts; ARGS="--only PP"
	@$(BIN)/python scripts/plan_check.py $(ARGS)

bench-harness: $(READY) ## measure an empty distributed test
	@$(BIN)/python bench/harness.py

bench-pipeline: $(READY) ## measure the pipeline executor per micro-batch against torch's
	@$(BIN)/python bench/pipeline.py $(ARGS)

bench-data: $(READY) ## measure pentatron prepare against the tokenizers library
	@$(BIN)/python bench/data.py $(ARGS)

bench-order: $(READY) ## measure building, loading and reading sample orders against megatron-core
	@$(BIN)/python bench/order.py $(ARGS)

bench-precision: $(READY) ## compare loss curves in bf16 and fp16 with fp32, and layouts with each other
	@$(BIN)/python bench/precision.py $(ARGS)

bench-convert: $(READY) ## measure import and export against a plain copy
	@$(BIN)/python bench/convert.py $(ARGS)

bench-checkpoint: $(READY) ## measure saving and loading against the disk and torch.distributed.checkpoint
	@$(BIN)/python bench/checkpoint.py $(ARGS)

bench-cpu: $(READY) ## measure a training step on the CPU against transformers
	@$(BIN)/python bench/cpu.py $(ARGS)

bench-host: $(READY) ## measure the host time of a training step against transformers
	@$(BIN)/python bench/host.py $(ARGS)

bench-gpu: $(READY) ## measure a training step on one GPU by kernel group; beside others: ARGS="--compare ours titan:compile --peers FOLDER"
	@$(BIN)/python bench/gpu.py $(or $(ARGS),--shape qwen3-8b-8l qwen2.5-1.5b --breakdown)

bench-gpu-page: $(READY) ## renew docs/performance.md on one GPU; some: ARGS="--only gpt2", list: ARGS=--list
	@$(BIN)/python bench/whole_page.py $(ARGS)

clean: ## remove .venv and caches (runs/ is kept)
	rm -rf $(VENV) .ruff_cache .mypy_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
