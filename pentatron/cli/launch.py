"""`pentatron launch slurm|torchrun`: writes the script that runs a training command on several machines."""

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.cli.configure import prepare
from pentatron.cli.options import Options, flags_of, option, options_help, parse_options_and_settings
from pentatron.cli.output import say, with_help
from pentatron.errors import ConfigError, UserError
from pentatron.launch.job import Job, job_problems, job_variables
from pentatron.launch.scripts import WRITTEN_BY, batch_script, node_script
from pentatron.settings.command_line import did_you_mean
from pentatron.settings.entry_points import ENTRY_POINTS, PRETRAIN_GPT, TRAIN, EntryPoint
from pentatron.settings.run_config import RunConfig
from pentatron.settings.settings import ProcessFacts
from pentatron.supervise.processes import SAFE_PATH
from pentatron.text import format_count, plural, redact

_KINDS = ("slurm", "torchrun")


@dataclass(frozen=True)
class LaunchOptions(Options):
    nodes: int = option(1, "number of machines", also="--nnodes", unlisted="--num-nodes")
    gpus_per_node: int | None = option(
        None,
        "workers per machine, one per GPU; with --device cpu, processes per machine",
        value="G",
        unlisted="--nproc-per-node",
    )
    script: str = option(
        "",
        "program to run instead of pentatron train: a script of the guides, or your own with the flags of pretrain_gpt.py",
        value="FILE",
    )
    write: str = option("", "file name of the script (NAME.sbatch or NAME.sh; - prints it)", value="FILE")
    job_name: str = option("pentatron", "name of the job", value="NAME", unlisted="--name")
    master_addr: str = option("", "host of the rendezvous (slurm: the first node)", value="HOST")
    master_port: int | None = option(
        None, "port of the rendezvous (slurm: from the job id; torchrun: 29500)", value="PORT"
    )
    max_restarts: int = option(0, "maximum restarts of failed workers, from the last checkpoint")
    grace: int = option(
        300, "seconds between the signal to save and the time limit of the job; 0: no signal", value="SECONDS"
    )
    setup: str = option("", "shell lines to run before the program, such as 'module load cuda'")
    python: str = option("", "Python interpreter on nodes (this one; in a container: python)", value="PATH")


@dataclass(frozen=True)
class SlurmOptions(LaunchOptions):
    submit: bool = option(False, "submit the script with sbatch")
    time: str = option("", "time limit of the job", value="12:00:00")
    partition: str = option("", "partition of the cluster", value="NAME")
    account: str = option("", "account that the job is billed to", value="NAME")
    qos: str = option("", "quality of service", value="NAME")
    constraint: str = option("", "features that the nodes must have", value="NAME")
    mem: str = option("", "memory per node", value="SIZE")
    cpus_per_task: int | None = option(None, "CPU cores per node, shared by its workers")
    gres: str = option("", "generic resources per node (gpu:G)")
    output: str = option(
        "%x-%j.out", "file of the job's output; sbatch replaces %x by its name and %j by its id", value="FILE"
    )
    container_image: str = option("", "container image to run in", value="IMAGE")
    container_mounts: str = option("", "further folders to mount in the container", value="FROM:TO,...")
    no_requeue: bool = option(False, "do not requeue the job when it reaches its time limit")
    sbatch: str = option("", "further options for sbatch", value="'--exclusive ...'")


USAGE = f"""usage: pentatron launch slurm    --nodes N --gpus-per-node G [options] [--submit] [--setting value ...]
       pentatron launch torchrun --nodes N --gpus-per-node G [options] [--setting value ...]

Writes a script that runs `pentatron train` with the same settings on N machines. Settings and sizes are checked first,
so that an invalid job is refused before it is queued. Arguments after -- are passed to the script unchanged.

{options_help(LaunchOptions)}

slurm only:
{options_help(SlurmOptions, excluding=LaunchOptions)}

  pentatron launch slurm --nodes 2 --gpus-per-node 8 --time 12:00:00 --preset llama3-8b --tp 8 --data-path DATA --train-iters 1000 --submit
  pentatron launch torchrun --nodes 2 --gpus-per-node 8 --master-addr 192.168.1.100 --preset llama3-8b --tp 8 --data-path DATA --train-iters 1000
"""
# Options of Slurm, and why torchrun refuses them.
_USE_SLURM = "is a Slurm option; leave it out, or use: pentatron launch slurm"
_SLURM_ONLY = dict.fromkeys({*flags_of(SlurmOptions)} - {*flags_of(LaunchOptions)}, _USE_SLURM)


@with_help(USAGE, without_words=True)
def launch_command(words: Sequence[str]) -> int:
    kind, rest = words[0], list(words[1:])
    if kind not in _KINDS:
        raise UserError(f"pentatron launch needs slurm or torchrun, not '{kind}'{did_you_mean(kind, _KINDS)}")
    separator = rest.index("--") if "--" in rest else len(rest)
    rest, passed = rest[:separator], rest[separator + 1 :]
    refused = {} if kind == "slurm" else _SLURM_ONLY
    options, settings = parse_options_and_settings(
        SlurmOptions, rest, lambda options: _program(options.script)[0], refused
    )
    entry, program = _program(options.script)
    job, config, notes = _checked_job(kind, options, settings, entry, [*program, *settings, *passed])
    grid = config.grid
    nodes = f"{job.nodes} {plural(job.nodes, 'node')} × {job.processes} = {job.world_size} processes"
    sizes = f"{grid.tensor} tensor × {grid.pipeline} pipeline × {grid.context} context × {grid.data} data"
    equation = f"{nodes} = {sizes}"
    script = batch_script if kind == "slurm" else node_script
    text = script(job, ["pentatron", "launch", *words], equation)
    if options.write == "-":
        sys.stdout.write(text)
        return 0
    for note in notes:
        say(f"note: {note}")
    file = Path(options.write or f"{job.job_name}.{'sbatch' if kind == 'slurm' else 'sh'}")
    _write_script(file, text)
    say(f"{file}: {equation}")
    if redact(text) != text:
        key = "the script seems to contain a key, so only its owner may read it"
        say(f"note: {key}; export the key in your shell instead, because jobs inherit the environment")
    # A value that the node computes itself is shell code, which is not shown.
    variables = [v.name if "$" in v.value else f"{v.name}={v.value}" for v in job.variables]
    say(f"variables it sets unless exported: {', '.join(variables)}")
    if options.submit:
        return _submit(file)
    say(_how_to_start(job, kind, file))
    return 0


def _program(script: str) -> tuple[EntryPoint, list[str]]:
    """Returns the entry point that defines the flags, and the words after `python` on the nodes."""
    entry, program = TRAIN, ["-m", "pentatron", "train"]
    if script:
        if not Path(script).is_file():
            guess = did_you_mean(script, [name for name in ENTRY_POINTS if name.endswith(".py")])
            raise UserError(f"--script {script} does not exist{guess}; name a file")
        entry, program = ENTRY_POINTS.get(Path(script).name, PRETRAIN_GPT), [script]
    return dataclasses.replace(entry, own=flags_of(SlurmOptions), own_help="pentatron launch"), program


def _checked_job(
    kind: str, options: SlurmOptions, settings: Sequence[str], entry: EntryPoint, words: Sequence[str]
) -> tuple[Job, RunConfig, list[str]]:
    """Returns the job, its configuration and notices; raises if the job or the configuration is invalid."""
    if not options.gpus_per_node:
        on_cpus = "on CPUs: the number of processes, with --device cpu"
        raise UserError(f"--gpus-per-node is missing; give --gpus-per-node G, the GPUs of a node ({on_cpus})")
    # Options with the name of a field of the job are copied unchanged.
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(Job) if hasattr(options, f.name)}
    values["python"] = options.python or ("python" if options.container_image else sys.executable)
    values |= {"processes": options.gpus_per_node, "uses_gpus": True, "words": tuple(words)}
    job = Job(**values, folder=str(Path.cwd()))
    # Before the settings, whose rules need a valid number of processes.
    if problems := job_problems(job):
        raise ConfigError(problems)
    cores = job.cpus_per_task or os.cpu_count() or 1
    prepared = prepare(settings, entry, ProcessFacts(job.world_size, job.processes, cores, "torchrun", True))
    config = prepared.resolved.config
    job = dataclasses.replace(job, uses_gpus=config.launch.device != "cpu")
    job = dataclasses.replace(job, variables=tuple(job_variables(job, config)))
    return job, config, [*prepared.resolved.notices, *_performance_notes(job, config, kind)]


def _performance_notes(job: Job, config: RunConfig, kind: str) -> list[str]:
    """Returns notes about a valid job that will be slow, or lose its progress."""
    notes = []
    requeues = kind == "slurm" and not job.no_requeue
    if any(len({rank // job.processes for rank in group}) > 1 for group in config.grid.groups("tensor")):
        span = f"tensor groups of {config.grid.tensor} span several nodes of {job.processes}"
        fix = f"use a --tensor-model-parallel-size that divides {job.processes}"
        notes.append(f"{span} GPUs, so every layer waits for the network; {fix}")
    if job.container_image and not job.container_mounts:
        fix = "mount other folders, such as the data, with --container-mounts FROM:TO,..."
        notes.append(f"only {job.folder} is mounted in the container; {fix}")
    if not config.checkpoint.save_checkpoints and (job.max_restarts or requeues):
        lost = "no checkpoint is saved, so a restarted job begins at step 0"
        notes.append(f"{lost}; add --save to keep checkpoints")
    if kind == "slurm" and not job.cpus_per_task and "--exclusive" not in job.sbatch_options:
        few = f"Slurm may give all {format_count(job.processes, 'worker')} of a node one core"
        fix = "give their number of cores, or --sbatch=--exclusive for the whole node"
        notes.append(f"without --cpus-per-task {few}; {fix}")
    return notes


def _write_script(file: Path, text: str) -> None:
    try:
        if file.exists():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            if not any(line.startswith(WRITTEN_BY) for line in lines[:3]):
                kept = "exists and was not written by pentatron launch"
                raise UserError(f"{file} {kept}; choose another file with --write")
        private = redact(text) != text
        if private:
            # Permissions are set before the key is written, so that no other user can read it in between.
            file.touch(mode=0o600)
            file.chmod(0o600)
        file.write_text(text, encoding="utf-8")
        file.chmod(0o700 if private else 0o755)
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise UserError(f"{file} {reason}; choose another file with --write") from None


def _submit(file: Path) -> int:
    if shutil.which("sbatch") is None:
        here = "sbatch is not installed on this machine; submit it on a machine of the cluster"
        raise UserError(f"{file} is written, but {here}")
    # Slurm passes sbatch's environment to the job. PYTHONSAFEPATH is left out, because the script sets it
    # itself.
    environment = {name: value for name, value in os.environ.items() if name != SAFE_PATH}
    result = subprocess.run(["sbatch", str(file)], capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        reason = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
        raise UserError(f"sbatch rejected {file} ({reason}); fix this and run: sbatch {file}")
    say(result.stdout.strip())
    return 0


def _how_to_start(job: Job, kind: str, file: Path) -> str:
    if kind == "slurm":
        return f"submit it with: sbatch {file}"
    if job.nodes == 1:
        return f"start it with: bash {file}"
    where = "" if job.master_addr else ", with MASTER_ADDR exported as the address of the first"
    between = " and" if job.nodes == 2 else ", ...,"
    return f"start it on every machine{where}: bash {file} 0{between} bash {file} {job.nodes - 1}"
