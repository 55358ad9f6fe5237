"""`pentatron launch slurm|torchrun`: the script that runs a training command on several machines."""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pentatron.cli.options import read_options
from pentatron.cli.prepare import prepare
from pentatron.cli.terminal import say
from pentatron.config.entry import ENTRY_POINTS, PRETRAIN_GPT, TRAIN, EntryPoint
from pentatron.config.flags import did_you_mean, is_flag, normal, parse_flags
from pentatron.config.run import RunConfig
from pentatron.config.settings import Facts
from pentatron.errors import ConfigError, UserError
from pentatron.launch.job import Job, problems_of
from pentatron.launch.processes import SAFE_PATH
from pentatron.launch.script import WRITTEN_BY
from pentatron.launch.slurm import batch_script
from pentatron.launch.torchrun import node_script
from pentatron.launch.variables import Variable, variables_of_a_job
from pentatron.text import counted, plural, redacted

USAGE = """usage: pentatron launch slurm    --nodes N --gpus-per-node G [options] [--submit] [--setting value ...]
       pentatron launch torchrun --nodes N --gpus-per-node G [options] [--setting value ...]

Writes a script that runs `pentatron train` with the same settings on N machines. Settings and sizes are checked first:
what cannot run is refused here, not in the queue. Words after -- go to the script as they are.

  --nodes N, --nnodes N         machines (1)
  --gpus-per-node G             workers on each, one per GPU; with --device cpu as many processes
  --script FILE                 run this program instead: a script of the guides, or your own with pretrain_gpt.py's flags
  --write FILE                  name of the script (NAME.sbatch or NAME.sh; - prints it)
  --job-name NAME               (pentatron)
  --master-addr HOST            where the machines meet (slurm: the first node)
  --master-port PORT            (slurm: by the job's number; torchrun: 29500)
  --max-restarts N              start failed workers again, from the last checkpoint (0)
  --grace SECONDS               time to save when the job is about to end (300; 0: no warning)
  --setup TEXT                  shell lines before the start, such as 'module load cuda'
  --python PATH                 interpreter on the nodes (this one; in a container: python)

slurm alone:
  --submit                      hand the script to sbatch
  --time 12:00:00, --partition NAME, --account NAME, --qos NAME, --constraint NAME, --mem SIZE, --cpus-per-task N
  --gres TEXT                   (gpu:G)
  --output FILE                 (%x-%j.out)
  --container-image IMAGE, --container-mounts FROM:TO,...   (it sees this folder besides)
  --no-requeue                  do not go back into the queue when the time limit cut the run short
  --sbatch '--exclusive ...'    further options of sbatch

  pentatron launch slurm --nodes 2 --gpus-per-node 8 --time 12:00:00 --preset llama3-8b --tp 8 --data-path DATA --train-iters 1000 --submit
  pentatron launch torchrun --nodes 2 --gpus-per-node 8 --master-addr 192.168.1.100 --preset llama3-8b --tp 8 --data-path DATA --train-iters 1000
"""
_COMMON: dict[str, Any] = {
    "nodes": 1, "gpus-per-node": 0, "script": "", "write": "", "job-name": "pentatron", "master-addr": "",
    "master-port": 0, "max-restarts": 0, "grace": 300, "setup": "", "python": "",
}  # fmt: skip
_SLURM: dict[str, Any] = {
    "submit": False, "time": "", "partition": "", "account": "", "qos": "", "constraint": "", "mem": "",
    "cpus-per-task": 0, "gres": "", "output": "%x-%j.out", "container-image": "", "container-mounts": "",
    "no-requeue": False, "sbatch": "",
}  # fmt: skip
_ALSO = {"nnodes": "nodes", "num-nodes": "nodes", "nproc-per-node": "gpus-per-node", "name": "job-name"}
_KINDS = ("slurm", "torchrun")


def launch_command(words: Sequence[str]) -> int:
    if not words or "--help" in words or "-h" in words:
        say(USAGE)
        return 0
    kind, rest = words[0], list(words[1:])
    if kind not in _KINDS:
        raise UserError(f"pentatron launch wants slurm or torchrun, not '{kind}'{did_you_mean(kind, _KINDS)}")
    passed: list[str] = []
    if "--" in rest:
        place = rest.index("--")
        rest, passed = rest[:place], rest[place + 1 :]
    options, settings = _divide(rest, kind)
    entry, program = _program(options["script"])
    entry = dataclasses.replace(entry, own=(*_COMMON, *_SLURM), own_help="pentatron launch")
    # A misspelt flag comes first: it may be the one whose value is missing.
    parse_flags(settings, entry)
    job, config, notes = _arrange(kind, options, settings, entry, [*program, *settings, *passed])
    equation = _equation(job, config)
    make = batch_script if kind == "slurm" else node_script
    text = make(job, ["pentatron", "launch", *words], equation)
    if options["write"] == "-":
        sys.stdout.write(text)
        return 0
    for note in notes:
        say(f"note: {note}")
    file = Path(options["write"] or f"{job.name}.{'sbatch' if kind == 'slurm' else 'sh'}")
    _write(file, text)
    say(f"{file}: {equation}")
    if redacted(text) != text:
        say(
            "note: the script holds what looks like a key, so only you can read it; better export that in your shell, jobs inherit it"
        )
    say(f"it sets what you have not exported: {', '.join(_written(item) for item in job.variables)}")
    if options.get("submit"):
        return _submit(file)
    say(_how_to_start(job, kind, file))
    return 0


def _divide(words: Sequence[str], kind: str) -> tuple[dict[str, Any], list[str]]:
    """Our own options, and the settings of the training command among which they stand."""
    known = _COMMON | _SLURM
    own: list[str] = []
    settings: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name = _ALSO.get(normal(word), normal(word)) if is_flag(word) else ""
        if name not in known:
            settings.append(word)
            continue
        if kind != "slurm" and name in _SLURM:
            raise UserError(f"--{name} is a matter of Slurm; leave it out, or use: pentatron launch slurm")
        own.append(word)
        if known[name] is not False and "=" not in word and queue:
            own.append(queue.pop(0))
    options, _ = read_options(own, known, "pentatron launch", _ALSO)
    return options, settings


def _program(script: str) -> tuple[EntryPoint, list[str]]:
    """What runs on the nodes, and whose flags it takes."""
    if not script:
        return TRAIN, ["-m", "pentatron", "train"]
    if not Path(script).is_file():
        guess = did_you_mean(script, [name for name in ENTRY_POINTS if name.endswith(".py")])
        raise UserError(f"--script {script} does not exist here{guess}")
    return ENTRY_POINTS.get(Path(script).name, PRETRAIN_GPT), [script]


def _arrange(
    kind: str, options: dict[str, Any], settings: Sequence[str], entry: EntryPoint, words: Sequence[str]
) -> tuple[Job, RunConfig, list[str]]:
    """The job, checked together with the settings it will train with."""
    if options["gpus-per-node"] == 0:
        raise UserError(
            "how many GPUs does a node have? Say --gpus-per-node G; on CPUs add --device cpu, and G is the number of processes"
        )
    container = options["container-image"]
    job = Job(
        nodes=options["nodes"],
        processes=options["gpus-per-node"],
        uses_gpus=True,
        python=options["python"] or ("python" if container else sys.executable),
        words=tuple(words),
        name=options["job-name"],
        folder=str(Path.cwd()),
        **{name: options[name] for name in ("time", "partition", "account", "qos", "constraint", "gres")},
        memory=options["mem"],
        cpus=options["cpus-per-task"],
        output=options["output"],
        container_image=container,
        container_mounts=options["container-mounts"],
        setup=options["setup"],
        sbatch=options["sbatch"],
        address=options["master-addr"],
        port=options["master-port"],
        grace=options["grace"],
        requeues=not options["no-requeue"],
        restarts=options["max-restarts"],
    )
    if problems := problems_of(job):
        raise ConfigError(problems)
    cores = job.cpus or os.cpu_count() or 1
    prepared = prepare(settings, entry, Facts(job.world_size, job.processes, cores, "torchrun", True))
    config = prepared.resolved.config
    uses_gpus = config.launch.device != "cpu"
    job = dataclasses.replace(
        job,
        uses_gpus=uses_gpus,
        variables=tuple(variables_of_a_job(config, job.nodes, job.processes, job.cpus, uses_gpus)),
    )
    return job, config, [*prepared.resolved.notices, *_remarks(job, config, kind)]


def _equation(job: Job, config: RunConfig) -> str:
    grid = config.grid
    nodes = f"{job.nodes} {plural(job.nodes, 'node')} × {job.processes} = {job.world_size} processes"
    sizes = f"{grid.tensor} tensor × {grid.pipeline} pipeline × {grid.context} context × {grid.data} data"
    return f"{nodes} = {sizes}"


def _remarks(job: Job, config: RunConfig, kind: str) -> list[str]:
    """What runs, but not as well as it could."""
    found = []
    groups = config.grid.groups("tensor")
    if any(len({rank // job.processes for rank in group}) > 1 for group in groups):
        found.append(
            f"tensor groups of {config.grid.tensor} reach over several nodes of {job.processes}, where every layer waits "
            f"for the network; a --tensor-model-parallel-size that divides {job.processes} keeps them inside"
        )
    if job.container_image and not job.container_mounts:
        found.append(
            f"the container sees {job.folder} and nothing else of the machine; name other folders, such as that of the data, "
            f"with --container-mounts FROM:TO,..."
        )
    if not config.checkpoint.save_checkpoints and (job.restarts or (kind == "slurm" and job.requeues)):
        found.append(
            "no checkpoint is saved, so a job that is started again begins at step 0; --save keeps what is trained"
        )
    if kind == "slurm" and not job.cpus and "--exclusive" not in job.batch_lines:
        found.append(
            f"without --cpus-per-task Slurm may give one core to the {counted(job.processes, 'worker')} of a node; say how many cores "
            f"they may use, or --sbatch=--exclusive for the whole node"
        )
    return found


def _write(file: Path, text: str) -> None:
    try:
        if file.exists():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            if not any(line.startswith(WRITTEN_BY) for line in lines[:3]):
                raise UserError(
                    f"{file} is not a script of ours and is kept; choose another name with --write"
                )
        private = redacted(text) != text
        if private:
            # Before anything of it is there to be read.
            file.touch(mode=0o600)
            file.chmod(0o600)
        file.write_text(text, encoding="utf-8")
        file.chmod(0o700 if private else 0o755)
    except OSError as error:
        raise UserError(
            f"{file} cannot be written ({error.strerror}); choose another place with --write"
        ) from None


def _written(item: Variable) -> str:
    """A value that the node works out itself has no place in a sentence."""
    return item.name if "$" in item.value else f"{item.name}={item.value}"


def _submit(file: Path) -> int:
    if shutil.which("sbatch") is None:
        raise UserError(
            f"{file} is written, but there is no sbatch here; submit it on a machine of the cluster"
        )
    # Slurm gives the job what sbatch has; the script itself says what its Python processes may import.
    inherited = {name: value for name, value in os.environ.items() if name != SAFE_PATH}
    handed = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, check=False, env=inherited)
    if handed.returncode != 0:
        reason = " ".join(handed.stderr.split()) or f"exit code {handed.returncode}"
        raise UserError(f"sbatch did not take {file} ({reason}); mend what it names and run: sbatch {file}")
    say(handed.stdout.strip())
    return 0


def _how_to_start(job: Job, kind: str, file: Path) -> str:
    if kind == "slurm":
        return f"submit it with: sbatch {file}"
    if job.nodes == 1:
        return f"start it with: bash {file}"
    where = "" if job.address else ", with MASTER_ADDR exported there as the address of the first"
    between = " and" if job.nodes == 2 else ", ...,"
    return f"start it on every machine{where}: bash {file} 0{between} bash {file} {job.nodes - 1}"
