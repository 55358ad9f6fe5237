"""Records short runs on the CPU, and commands on their data files, checkpoints, metrics and reports."""

import hashlib
import json
import re
from pathlib import Path

from recorded.commands import Recorder
from recorded.noise import without_times

_MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-2 --global-batch-size 8 --micro-batch-size 2"
_LENGTH = "--train-iters 4 --save-interval 2 --eval-interval 2 --eval-iters 1 --log-interval 1 --seed 7"
_HERE = "--device cpu --threads-per-process 1"
_DATA = "--data-path corpus_text_document --split 80,10,10 --tokenizer-model tokenizer"
_TRAIN = f"train {_MODEL} {_LENGTH} {_HERE} {_DATA}"
_STEP = "checkpoints/step-00000004"

# Name of the run → its flags.
RUNS = {
    "one": "",
    "tp2-pp2": "--nproc-per-node 4 --tp_size 2 --pp_size 2",
    "dp2-zero2": "--nproc-per-node 2 --zero-stage 2",
    "dp2-zero3": "--nproc-per-node 2 --zero-stage 3",
    "cp2": "--nproc-per-node 2 --context-parallel-size 2",
    "ep2": "--nproc-per-node 2 --num-experts 4 --ep 2 --swiglu --normalization RMSNorm",
    "llama": "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --bf16 "
    "--untie-embeddings-and-output-weights --save-performance-summary --console-lines megatron",
}
PREPARING = {
    "prepare": "prepare --input text.jsonl --output-prefix corpus --tokenizer-type HuggingFaceTokenizer "
    "--tokenizer-model tokenizer --append-eod --workers 1",
    "prepare again": "prepare --input text.jsonl --output-prefix corpus --tokenizer-type NullTokenizer --vocab-size 9",
    "data describe": "data describe corpus_text_document",
    "data describe json": "data describe corpus_text_document --json",
    "data verify": "data verify corpus_text_document --vocab-size 96",
    "data verify wrong": "data verify corpus_text_document --vocab-size 9",
    "data merge": "data merge twice corpus_text_document corpus_text_document",
    "data describe twice": "data describe twice --json",
    "data show": f"data show {_DATA} --seq-length 16 --train-samples 20 --index 0:3",
    "data show json": f"data show {_DATA} --seq-length 16 --train-samples 20 --index 0:3 --json",
    "data show valid": f"data show {_DATA} --seq-length 16 --train-samples 20 --part valid --index 0 --json",
    "data show chats": "data show --sft --data-path chats.jsonl --tokenizer-model tokenizer --seq-length 64 --train-samples 10 --index 0:2",
    "data show chats json": "data show --sft --data-path chats.jsonl --tokenizer-model tokenizer --seq-length 64 --train-samples 10 --index 0:2 --json",
}
READING = {
    "resumed": f"{_TRAIN} --run-dir one --train-iters 6",
    "resumed in another layout": f"{_TRAIN} --run-dir dp2-zero2 --train-iters 5 --nproc-per-node 1",
    "refused, other model": f"{_TRAIN} --load one --run-dir other --hidden-size 64",
    "refused, no data": f"train {_MODEL} {_LENGTH} {_HERE} --data-path nothing --vocab-size 96",
    "refused, too few samples": f"train {_MODEL} {_LENGTH} {_HERE} {_DATA} --epochs 0",
    "epochs": f"{_TRAIN.replace('--train-iters 4', '--epochs 1')} --run-dir epochs --eval-interval 0",
    "config of the run": f"config {_MODEL} {_LENGTH} {_DATA} --run-dir one",
    "config of a resumed run": "config --config one/config.yaml",
    "config with load": "config --load one --seq-length 16 --data-path corpus_text_document --train-iters 8",
    "config with load, other model": f"config {_DATA} --load one --train-iters 8 --num-layers 3 --rotary-base 5e5 --swiglu",
    "config with epochs": f"config {_MODEL} {_DATA} --epochs 2 --split 100,0,0",
    "checkpoint inspect": "checkpoint inspect one",
    "checkpoint inspect json": "checkpoint inspect one --json",
    "checkpoint inspect step": f"checkpoint inspect tp2-pp2/{_STEP}",
    "checkpoint inspect step json": f"checkpoint inspect tp2-pp2/{_STEP} --json",
    "checkpoint inspect tensors": f"checkpoint inspect one/{_STEP} --tensors *mlp* --stats",
    "checkpoint inspect tensors json": f"checkpoint inspect dp2-zero3/{_STEP} --tensors --stats --json",
    "checkpoint verify": "checkpoint verify one --numbers",
    "checkpoint verify json": "checkpoint verify one tp2-pp2 --numbers --json",
    "checkpoint diff": f"checkpoint diff one/{_STEP} tp2-pp2/{_STEP}",
    "checkpoint diff json": f"checkpoint diff one/{_STEP} one/checkpoints/step-00000002 --json",
    "checkpoint diff tolerance": f"checkpoint diff one/{_STEP} dp2-zero3/{_STEP} --weights-only --tolerance 1e-4 --json",
    "checkpoint reshard": f"checkpoint reshard one/{_STEP} resharded --tp_size 2 --zero-stage 1 --world-size 4",
    "checkpoint diff resharded": f"checkpoint diff one/{_STEP} resharded",
    "checkpoint prune": "checkpoint prune dp2-zero3 --keep 1 --dry-run",
    "checkpoint prune json": "checkpoint prune dp2-zero3 --keep 1 --json",
    "export": "export llama exported",
    "import": "import exported imported",
    "checkpoint diff imported": f"checkpoint diff llama/{_STEP} imported --weights-only",
    "export refused": "export one exported",
    "generate": "generate one --greedy --max-new-tokens 6 --threads 1 --device cpu w1 w2",
    "generate json": "generate one --greedy --max-new-tokens 6 --threads 1 --device cpu --tokens 5,6;7 --json",
    "generate sampled": "generate exported --seed 3 --max-new-tokens 6 --threads 1 --device cpu --tokens 5,6 --json",
    "monitor": "monitor tp2-pp2 --once",
    "monitor lost": "monitor nothing --once",
    "verify json": "verify --tp_size 2 --json",
    "verify": "verify --tp_size 2 --zero-stage 1 --sequence-parallel --everything",
    "bench list": "bench --nproc-per-node 8 --list --variants zero sp schedules --num-experts 4",
    "bench": "bench --nproc-per-node 1 --steps 1 --warmup 1 --device cpu",
    "launch slurm": f"launch slurm --nodes 2 --gpus-per-node 4 --time 1:00:00 --write - {_MODEL} --mock-data --vocab-size 96 --train-iters 5 --tp 4",
    "launch torchrun": f"launch torchrun --nodes 2 --gpus-per-node 4 --master-addr 10.0.0.1 --write - {_MODEL} --mock-data --vocab-size 96 --train-iters 5 --pp 2",
    "launch refused": f"launch slurm --nodes 2 --gpus-per-node 4 --write - {_MODEL} --mock-data --vocab-size 96 --train-iters 5 --tp 3",
    "plan of a folder": "plan exported --gpus 2 --json",
    "layout of a run": "layout --load one --seq-length 16 --world-size 2 --tp_size 2 --json",
    "doctor": "doctor --no-trials",
    "doctor json": "doctor --no-trials --json",
}
# Commands whose output has no times and no memory in use.
_TIMELESS = ("config", "layout", "plan", "launch", "bench list", "checkpoint diff", "generate")
FOLDERS = (*RUNS, "epochs", "resharded", "imported", "exported", "benchmark_results")


def record_runs(recorder: Recorder) -> None:
    """Records every command in turn, then every file that was left."""
    for name, words in PREPARING.items():
        recorder.record(f"data/{name}", words.split(), noise="times" if name == "prepare" else "exact")
    for path in sorted(recorder.place.glob("*.*")):
        if path.suffix in (".bin", ".idx", ".meta"):
            recorder.write(f"data/files/{path.name}", described(recorder, path))
    for name, words in RUNS.items():
        asked = [*_TRAIN.split(), "--run-dir", name, *words.split()]
        recorder.record(f"runs/{name}", asked, noise="times")
        _record_folder(recorder, recorder.place / name, f"runs/{name} files")
    for name, words in READING.items():
        noise = "exact" if name.startswith(_TIMELESS) else "numbers" if name == "bench" else "times"
        recorder.record(f"commands/{name}", words.split(), noise=noise)
    for name in FOLDERS:
        _record_folder(recorder, recorder.place / name, f"left/{name}")


def _record_folder(recorder: Recorder, folder: Path, into: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            recorder.write(f"{into}/{path.relative_to(folder)}", described(recorder, path))


def described(recorder: Recorder, path: Path) -> str:
    """Returns a text file without its times, or the checksum of a binary file."""
    data = path.read_bytes()
    checksum = f"{len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}\n"
    if path.suffix in (".bin", ".idx", ".safetensors"):
        return checksum
    if path.suffix == ".jsonl":
        rows = [json.dumps(without_times(json.loads(line))) for line in data.decode().splitlines()]
        return "".join(f"{row}\n" for row in rows)
    text = data.decode(errors="replace")
    if path.suffix == ".meta":
        # Removes `job`, a checksum that includes times and paths of the inputs, and the line's checksum below
        # it.
        return re.sub(r'"job": "\w+"(.*)\n\w+', r'"job": "..."\1\n...', text)
    if "benchmark_results" in path.parts:
        if path.suffix == ".svg":
            return "a picture of times\n"
        return recorder.noise.remove(text, "numbers")
    return recorder.noise.remove(text, "exact" if path.suffix == ".svg" else "times")
