# Two commands do everything: `make demo` trains, `make test` tests. Both set up `.venv` first when it is missing.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Tests run in as many processes as there are cores, but no more than this. One that can be debugged: ARGS="-n 0 --pdb".
WORKERS ?= 4
# Extra words for pip, e.g. PIP_ARGS="--extra-index-url URL-OF-A-CUDA-BUILD" (see README, "Set-up").
PIP_ARGS ?=
# How many cases `make fuzz` runs.
N ?= 500

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format contract guides parity cuda families sweep fuzz fuzz-data pictures plan-check slurm faults adversary chaos bench-harness bench-pipeline bench-data bench-order bench-convert bench-precision bench-checkpoint bench-gpu bench-gpu-page bench-cpu bench-host clean

help: ## what can be made
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

check: $(READY) ## format, lint and type check, changing nothing
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(READY) ## format the code and mend what the linter can
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

contract: $(READY) ## run what shows each contract item, print the count, write docs/contract.md
	@$(BIN)/python scripts/contract.py

guides: $(READY) ## every command of the five guides in small form, write docs/guides/README.md; some: ARGS="--only 002"
	@$(BIN)/python scripts/guides.py $(ARGS)

families: $(READY) ## every family of Hugging Face models against transformers, write docs/families.md; ARGS="--only qwen3"
	@$(BIN)/python scripts/families.py $(ARGS)

parity: $(READY) ## every layout against one process, write docs/parity.md; a corner: ARGS="--only tp2"
	@$(BIN)/python scripts/parity.py $(ARGS)

cuda: $(READY) ## on a machine with a GPU: every family, layout and kind of run against its reference; writes docs/cuda.md: ARGS=--write
	@$(BIN)/python scripts/on_gpu.py $(ARGS)

sweep: $(READY) ## what make test leaves out of its longer series, such as the other eighty of a hundred pairs of layouts
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --maxprocesses $(WORKERS) --dist worksteal -m sweep $(ARGS)

fuzz: $(READY) ## N random models in random layouts against one process; more: ARGS="--seed 2 --minutes 10 --only zbv"
	@$(BIN)/python scripts/fuzz.py --cases $(N) $(ARGS)

fuzz-data: $(READY) ## N (10000) random data files, damaged: no wrong token, no crash
	@$(BIN)/python scripts/fuzz_data.py --cases $(if $(filter file,$(origin N)),10000,$(N)) $(ARGS)

pictures: $(READY) ## draw the pictures of docs/ anew, from schedules, grids, layouts and results
	@$(BIN)/python scripts/draw_pictures.py
	@$(BIN)/python scripts/draw_layouts.py

slurm: $(READY) ## the written Slurm scripts on a real Slurm of two nodes on this machine: warned, preempted, cancelled
	@$(BIN)/python scripts/slurm_trial.py

faults: $(READY) ## processes killed, frozen and cut off, files damaged: what becomes of it, write docs/faults.md; ARGS="--only storage"
	@$(BIN)/python scripts/faults.py $(ARGS)

adversary: $(READY) ## failing disks, power cuts, hostile files and lost output, drawn from a seed, into docs/faults.md; ARGS="--seed 1 2 3"
	@$(BIN)/python scripts/adversary.py $(ARGS)

chaos: $(READY) ## N (50) random kills of ranks and launcher over one TP2×PP2×DP2 run: the same end, bit for bit; ARGS="--seed 2"
	@$(BIN)/python scripts/chaos.py --kills $(if $(filter file,$(origin N)),50,$(N)) $(ARGS)

plan-check: $(READY) ## bytes that pentatron plan foresees against those of real steps, in 29 layouts; some: ARGS="--only PP"
	@$(BIN)/python scripts/plan_check.py $(ARGS)

bench-harness: $(READY) ## cost of an empty distributed test against fresh processes
	@$(BIN)/python bench/harness.py

bench-pipeline: $(READY) ## cost of the pipeline per micro-batch against torch's own
	@$(BIN)/python bench/pipeline.py $(ARGS)

bench-data: $(READY) ## rate and memory of pentatron prepare against the tokenizers library
	@$(BIN)/python bench/data.py $(ARGS)

bench-order: $(READY) ## building, finding and reading orders of samples, against megatron-core
	@$(BIN)/python bench/order.py $(ARGS)

bench-precision: $(READY) ## loss curves in bf16 and fp16 against fp32, and of layouts against each other
	@$(BIN)/python bench/precision.py $(ARGS)

bench-convert: $(READY) ## rate and memory of import and export against a plain copy
	@$(BIN)/python bench/convert.py $(ARGS)

bench-checkpoint: $(READY) ## saving and loading against the disk and against torch.distributed.checkpoint
	@$(BIN)/python bench/checkpoint.py $(ARGS)

bench-cpu: $(READY) ## a training step on the CPU against the same model in transformers
	@$(BIN)/python bench/cpu.py $(ARGS)

bench-host: $(READY) ## what the host takes for a training step, against transformers
	@$(BIN)/python bench/host.py $(ARGS)

bench-gpu: $(READY) ## a training step on one GPU, by kernel group; beside others: ARGS="--compare ours titan:compile --peers FOLDER"
	@$(BIN)/python bench/gpu.py $(or $(ARGS),--shape qwen3-8b-8l qwen2.5-1.5b --breakdown)

bench-gpu-page: $(READY) ## all of docs/performance.md on one GPU, and the page; some: ARGS="--only gpt2", what there is: ARGS=--list
	@$(BIN)/python bench/whole_page.py $(ARGS)

clean: ## remove .venv and caches (runs/ is kept)
	rm -rf $(VENV) .ruff_cache .mypy_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
