"""Records `pentatron config`, `--help`, `layout` and `plan`, which start no run."""

import re
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path

from recorded.commands import Recorder, slug

LISTED = Path(__file__).with_name("configurations.txt")
LEAST = "--mock-data --vocab-size 100 --train-iters 10"
SCRIPTS = (
    *("pretrain_gpt.py", "megatron_core_training_example.py"),
    *("train.py", "train_3d_parallel.py", "train_megatron.py"),
)
COMMANDS = (
    *(
        "prepare",
        "data",
        "data show",
        "train",
        "generate",
        "import",
        "export",
        "checkpoint",
        "checkpoint reshard",
    ),
    *("config", "layout", "plan", "verify", "presets", "launch", "bench", "monitor", "doctor"),
)

# Name → number of processes and flags, for every preset.
PRESET_LAYOUTS = {
    "one process": (1, ""),
    "tp2": (2, "--tp_size 2 --sequence-parallel"),
    "pp2": (2, "--pp_size 2 --num-microbatches 4"),
    "interleaved": (4, "--pp_size 2 --virtual-pipeline-model-parallel-size 2 --num-microbatches 4"),
    **{f"dp2 zero{stage}": (2, f"--zero-stage {stage} --bf16") for stage in range(4)},
    "cp2": (2, "--context-parallel-size 2"),
    "ep2": (2, "--expert-model-parallel-size 2 --bf16"),
    "gpu": (1, "--device cuda --bf16"),
}
# Every setting is added to each of these; values that no setting of its type may have, only to the first.
CONTEXTS = {
    "alone": f"{LEAST} --device cpu",
    "spread": f"{LEAST} --nproc-per-node 8 --tp_size 2 --pp_size 2 --num-layers 4 --swiglu --bf16 --zero-stage 1",
    "experts": f"{LEAST} --nproc-per-node 4 --num-experts 4 --moe-ffn-hidden-size 32 --ep 2 --bf16 --device cuda",
}
_VALUES = {"N": ("2", "7"), "X": ("0.25", "2"), "TEXT": ("something",)}
_WRONG = {"N": ("0", "-1", "2.5", "many"), "X": ("0", "-1", "much"), "TEXT": ()}

LAYOUTS = (
    "--world-size 8 --tp_size 2 --pp_size 2 --draw",
    "--world-size 16 --tp_size 2 --pp_size 4 --virtual-pipeline-model-parallel-size 2 --num-layers 8 --num-microbatches 8 --draw",
    "--world-size 4 --pp_size 4 --num-layers 8 --pipeline-schedule zero-bubble --num-microbatches 8 --draw",
    "--world-size 2 --pp_size 2 --num-layers 8 --pipeline-schedule zbv --untie-embeddings-and-output-weights --draw",
    "--world-size 2 --pp_size 2 --num-layers 8 --pipeline-schedule dualpipev --untie-embeddings-and-output-weights --draw",
    "--world-size 8 --context-parallel-size 2 --tp_size 2 --zero-stage 3 --all",
    "--world-size 8 --num-experts 8 --ep 4 --pp_size 2",
    "--preset llama3-8b --world-size 16 --tp_size 4 --pp_size 2",
    "--preset qwen3-30b-a3b --world-size 16 --ep 8 --pp_size 2",
    "--world-size 6 --tp_size 4",
)
PLANS = (
    *(f"--preset {name} --gpus {n}" for name in ("gpt2", "llama3-8b", "qwen3-30b-a3b") for n in (1, 8, 64)),
    "--preset qwen2.5-0.5b --gpus 2 --gpu rtx4090 --seq-length 2048",
    "--preset llama3-70b --gpus 64 --gpu-memory 80 --tp 8 --pp 4",
    "--preset llama3-8b --gpus 16 --zero-stage 3 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--preset llama3-8b --gpus 8 --gpu h200 --fp8 e4m3 --bf16",
    "--preset llama3-8b --gpus 8 --host-memory 1000 --optimizer-cpu-offload --zero-stage 1",
    "--preset llama3-8b --gpus 8 --pp 4 --pipeline-schedule zero-bubble",
    "--preset mixtral-8x7b --gpus 32 --gpu a100 --ep 8 --context-parallel-size 2",
    "--preset gpt3-175b --gpus 1024 --tp 8 --pp 16",
    "--num-layers 4 --hidden-size 256 --seq-length 128 --vocab-size 1000 --global-batch-size 16 --gpus 2 --gpu cpu",
    "--preset llama3-8b --gpus 7 --tp 2",
)


def record_questions(recorder: Recorder, tree: Path, only: Collection[str]) -> None:
    """Records the groups in `only`, and the files that they leave, which should be none."""
    groups = {
        "help": _help,
        "listed": _listed,
        "presets": _presets,
        "settings": _settings,
        "layout": _layout,
        "plan": _plan,
    }
    before = sorted(recorder.place.rglob("*"))
    for name, record in groups.items():
        if name in only:
            record(recorder)
    if "files" in only:
        for path in sorted((tree / "configs").iterdir()):
            recorder.record(f"files/{path.name}", ["config", "--config", str(path), *LEAST.split()])
    if "runs" not in only:
        left = sorted(set(recorder.place.rglob("*")) - set(before))
        recorder.write(f"files left by {' '.join(only)}.txt", "".join(f"{path.name}\n" for path in left))


def _help(recorder: Recorder) -> None:
    """Records every help page, and the flags in it by name."""
    pages = {name: [*name.split(), "--help"] for name in COMMANDS} | {"pentatron": ["--help"]}
    for name, words in pages.items():
        output = recorder.record(f"help/{name}", words)
        recorder.write(
            f"help/flags/{name}.txt",
            "".join(f"{flags}: {sentence}\n" for flags, sentence in sorted(flag_entries(output.out))),
        )
    recorder.record("help/list of presets", ["presets"])
    for mistake in (
        ["trian"],
        ["config", "--hiden-size", "3"],
        ["data", "descrbe"],
        ["plan", "--gpu", "h1000"],
    ):
        recorder.record(f"help/mistake {slug(mistake)}", mistake)


def flag_entries(page: str) -> Iterator[tuple[str, str]]:
    """Yields flags with values, and the sentence, of every entry of a help page that begins with a flag."""
    flags, sentence = "", ""
    for line in [*page.splitlines(), ""]:
        is_flag = line.startswith("  --")
        if flags and (is_flag or not line.startswith("   ")):
            yield flags, sentence
            flags = ""
        if is_flag:
            flags, _, sentence = (part.strip() for part in line.strip().partition("  "))
        elif flags:
            sentence = f"{sentence} {line.strip()}".strip()


def _listed(recorder: Recorder) -> None:
    group = ""
    for line in LISTED.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") or not line:
            group = line[2:]
            continue
        who, program, *words = shlex.split(line.replace("LEAST", LEAST, 1))
        processes, _, launcher = who.partition("@")
        world, _, local = processes.partition("/")
        entry = [] if program == "train" else ["--as", program]
        started = _started_by(launcher, world, local or world) if launcher else {}
        if not launcher and world != "1":
            words += ["--nproc-per-node", world]
        shown = "".join(f"{name}={value} " for name, value in started.items())
        recorder.record(
            f"config/{group}/{slug([who, program, *words])}", ["config", *entry, *words], started, shown=shown
        )


def _started_by(launcher: str, world: str, local: str) -> dict[str, str]:
    if launcher == "slurm":
        tasks = {"SLURM_STEP_TASKS_PER_NODE": local, "SLURM_NTASKS": world, "SLURM_NODEID": "0"}
        return {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", **tasks}
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local}
    return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def _presets(recorder: Recorder) -> None:
    listed = recorder.record("presets/list", ["presets"]).out
    names = [
        line.split()[0] for line in listed.splitlines()[1:] if line[:1].isalnum() and "use one" not in line
    ]
    for name in names:
        data = [] if name == "demo" else ["--mock-data", "--train-iters", "10"]
        for layout, (processes, words) in PRESET_LAYOUTS.items():
            asked = ["config", "--preset", name, *data, "--nproc-per-node", str(processes), *words.split()]
            recorder.record(f"presets/{name}/{layout}", asked)
        recorder.record(f"presets/{name}/json", ["config", "--preset", name, *data, "--json"])
    for script in SCRIPTS:
        recorder.record(f"presets/as {script}", ["config", "--as", script, *LEAST.split(), "--all"])
    recorder.record("presets/all", ["config", *LEAST.split(), "--all"])
    recorder.record("presets/nothing", ["config"])


def _settings(recorder: Recorder) -> None:
    """Records every flag of `pentatron train --help` with legal values and with wrong ones."""
    page = recorder.record("settings/help", ["train", "--help"]).out
    for flags, kind, sentence in _flags_of(page):
        legal, wrong = _values(kind, sentence)
        for number, flag in enumerate(flags):
            name = flag.lstrip("-")
            for value in legal if number == 0 else legal[:1]:
                for context, words in CONTEXTS.items():
                    if number == 0 or context == "alone":
                        asked = ["config", *words.split(), flag, *value.split()]
                        recorder.record(
                            f"settings/{name}/{context} {value}".replace("|", "-").rstrip(), asked
                        )
            for value in wrong if number == 0 else ():
                asked = ["config", *CONTEXTS["alone"].split(), *(f"{flag}={value}".split())]
                recorder.record(f"settings/{name}/wrong {value}".rstrip(), asked)


def _flags_of(page: str) -> Iterator[tuple[list[str], str, str]]:
    """Yields flags of one kind in one entry, the kind of their value ("" for none), and the sentence."""
    for flags, sentence in flag_entries(page):
        waiting: list[str] = []
        for part in flags.split(", "):
            flag, _, kind = part.partition(" ")
            waiting.append(flag)
            if kind:
                yield waiting, kind, sentence
                waiting = []
        if waiting:
            yield waiting, "", sentence


def _values(kind: str, sentence: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns legal values and wrong ones."""
    bare = kind.removesuffix(" ...")
    if not kind:
        return ("",), ("maybe",)
    if choices := re.search(r"one of ((?:[\w.-]+, )+[\w.-]+)", sentence):
        return tuple(choices[1].split(", ")), ("nonsense",)
    if bare not in _VALUES:
        return tuple(bare.split("|")), ("nonsense",)
    several = (" ".join(_VALUES[bare] * 2),) if kind != bare else ()
    return (*_VALUES[bare], *several), (*_WRONG[bare], "")


def _layout(recorder: Recorder) -> None:
    for words in LAYOUTS:
        recorder.record(f"layout/{slug(words.split())}", ["layout", *words.split()])
        data = [word for word in words.split() if word not in ("--draw", "--all")]
        recorder.record(f"layout/{slug(words.split())} json", ["layout", *data, "--json"])


def _plan(recorder: Recorder) -> None:
    for number, words in enumerate(PLANS):
        if number % 4 == 0:
            recorder.record(f"plan/{slug(words.split())}", ["plan", *words.split()])
        recorder.record(f"plan/{slug(words.split())} json", ["plan", *words.split(), "--json"])
