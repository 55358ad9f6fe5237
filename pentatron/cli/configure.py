"""From the words of a command line to a checked configuration, before anything starts."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.cli.environment import Worker, find_worker, launched_too_often, timeout_seconds
from pentatron.cli.loaded import learn_from_loaded, told_by_a_model, use_hub_folder
from pentatron.cli.worker import this_attempt, this_worker
from pentatron.data.indexed import missing_pairs
from pentatron.errors import ConfigError, UserError
from pentatron.settings.data_paths import (
    NAMED,
    Blend,
    counted_by_the_run,
    names_files,
    trained_files,
    without_epochs,
)
from pentatron.settings.entry import EntryPoint
from pentatron.settings.resolve import Resolved, foreseen, gather, problems_beside, resolve
from pentatron.settings.run import table
from pentatron.settings.settings import Draft, Facts, Start, start_of, unset
from pentatron.settings.training_rules import is_weight, named_text
from pentatron.supervise.attempts import FIRST, Attempt

# Files of data that are named and not there, told before anything starts.


def find_data(draft: Draft) -> None:
    """What a run of this machine would read; what is not there is wrong."""
    if draft.mock_data or draft.corpus:
        # The rule about sources says that one of them is too many.
        return
    evaluates = draft.eval_iters and (draft.eval_interval or draft.skip_train)
    for name in NAMED if evaluates else NAMED[:2]:
        words = getattr(draft, name)
        missing = "" if not words else _conversations(words) if draft.sft else _pairs(words, name)
        if missing:
            draft.wrong[name] = missing


def _pairs(words: tuple[str, ...], name: str) -> str:
    try:
        return missing_pairs(Blend.parse(words, table()[name].flag).prefixes)
    except UserError:
        # The rule about blends says what is wrong with them.
        return ""


def _conversations(words: tuple[str, ...]) -> str:
    if any(is_weight(word) for word in words):
        # The rule about conversations says that they have none.
        return ""
    gone = next((Path(word) for word in words if not Path(word).exists()), None)
    if gone is None:
        return ""
    from pentatron.data.conversations import no_file

    return no_file(gone)


# How many samples one pass over the training data has, read from its index files before anything starts.


def learn_epoch(draft: Draft) -> None:
    """For `--epochs`, once the length of a sequence is settled; what cannot be read is wrong."""
    is_wrong = not draft.wrong.keys().isdisjoint(("seq_length", *NAMED))
    if draft.epochs is None or not names_files(draft) or is_wrong or counted_by_the_run(draft):
        return
    if named_text(draft.data_path or ()):
        # Of which a rule says what to do with it.
        return
    from pentatron.data.gpt_dataset import samples_of_files

    try:
        if not without_epochs(draft):
            draft.epoch_samples = samples_of_files(*trained_files(draft), draft.seq_length)
    except UserError as error:
        draft.wrong["epochs"] = str(error)


# Of a file system in bytes: a name, and a path with room for the longest one that a run makes below its folder.
_LONGEST_NAME, _LONGEST_PATH = 255, 3800


@dataclass(frozen=True)
class Prepared:
    resolved: Resolved
    facts: Facts
    worker: Worker | None
    attempt: Attempt
    start: Start


def prepare(
    words: Sequence[str],
    entry: EntryPoint,
    planned: Facts | None = None,
    starts: bool = False,
    own_data: bool = False,
) -> Prepared:
    """Reads, completes and checks the configuration; raises every problem at once.

    `planned` are the processes of a job that will run elsewhere, in place of those of this machine. `starts`: the run is
    about to start, and reads what is named, unless it has `own_data`.
    """
    worker = None if planned else find_worker(os.environ)
    draft = gather(words, entry)
    _require_names(draft)
    find_tokenizer(draft)
    learn_vocabulary(draft)
    _learn_timeout(draft, os.environ)
    if worker is not None:
        draft.notices += launched_too_often(os.environ)
    if draft.job_id is None and "SLURM_JOB_ID" in os.environ:
        draft.derive("environment SLURM_JOB_ID", job_id=os.environ["SLURM_JOB_ID"])
    facts = planned or _facts(draft, worker)
    if unset(draft.threads_per_process) and planned is None and (threads := asked_threads(facts)):
        draft.derive("environment OMP_NUM_THREADS", threads_per_process=threads)
    if starts and not own_data and worker is None:
        # Ranks that a launcher started tell each other, as one machine may have files that another lacks.
        find_data(draft)
    attempt = FIRST
    if planned is None:
        attempt = this_attempt(os.environ, Path(foreseen(draft, facts).run_dir))
    if attempt.restarted:
        _go_on_after_restart(draft, facts)
    start = start_of(foreseen(draft, facts), draft.given("load"), entry.resumes or attempt.restarted)
    try:
        learn_from_loaded(draft, facts, start)
    except UserError as error:
        others = problems_beside(draft, facts, told_by_a_model(draft)) if draft.given("load") else []
        if not others:
            raise
        raise ConfigError([str(error), *others]) from None
    if not own_data and not facts.launcher:
        # Under a launcher the ranks count when they have met, for the same reason.
        learn_epoch(draft)
    return Prepared(resolve(draft, facts), facts, worker, attempt, start)


def _require_names(draft: Draft) -> None:
    """Folders that a run makes must have names that can be made, and written into its files."""
    for setting in ("run_dir", "save"):
        name = getattr(draft, setting)
        if not isinstance(name, str):
            continue
        flag = table()[setting].flag
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError(f"{flag} {name!a} is not UTF-8; choose another name") from None
        longest = max(len(part.encode()) for part in Path(name).parts or (name,))
        if longest > _LONGEST_NAME or len(os.fsencode(Path(name).absolute())) > _LONGEST_PATH:
            raise UserError(
                f"{flag} {name[:40]}... is too long: a name has at most {_LONGEST_NAME} bytes, and a path {_LONGEST_PATH}; choose a shorter one"
            )


def _go_on_after_restart(draft: Draft, facts: Facts) -> None:
    """A restart goes on with the run, also where the command starts anew."""
    draft.derive("started again after a failure", fresh=False)
    if not foreseen(draft, facts).save_checkpoints:
        draft.notices.append(
            "the job was started again, and this command saves no checkpoint, so training starts at step 0; --save keeps what is trained"
        )


def asked_threads(facts: Facts) -> int:
    """What the user exported; the 1 that torchrun sets where nothing is exported is nobody's wish."""
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    asked = int(text) if text.isascii() and text.isdigit() else 0
    return 0 if asked == 1 and facts.launcher else asked


def _facts(draft: Draft, worker: Worker | None) -> Facts:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if worker is not None:
        met = "MASTER_ADDR" in os.environ
        # Our own launcher has no name: it is this program.
        launcher = "" if this_worker() is not None else worker.launcher
        return Facts(worker.world_size, worker.local_size, cores, launcher, met)
    processes = draft.nproc_per_node
    if processes is None:
        processes = _processes_by_device(draft.device)
    # A number below 1 is refused later, together with all other problems.
    return Facts(max(1, processes), max(1, processes), cores)


def _processes_by_device(device: str) -> int:
    if device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def find_tokenizer(draft: Draft) -> None:
    """A tokenizer may be that of a model on the hub."""
    name = draft.tokenizer_model
    if name is None or Path(name).exists():
        return
    try:
        use_hub_folder(draft, "tokenizer_model")
    except UserError as error:
        # Without the tokenizer the vocabulary may be unknown too: that is one problem, not two.
        open_size = unset(draft.vocab_size) and unset(draft.padded_vocab_size)
        wrong = "vocab_size" if open_size else "tokenizer_model"
        draft.wrong[wrong] = f"Tokenizer not found: {error}; check --tokenizer-model"


def learn_vocabulary(draft: Draft) -> None:
    """A named tokenizer knows its vocabulary; nobody should have to type it."""
    if not unset(draft.vocab_size) or not unset(draft.padded_vocab_size):
        return
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    kind, model, vocab_file, merge_file = (getattr(draft, name) for name in names)
    unusable = table()["tokenizer_type"].refuses(kind) or "vocab_size" in draft.wrong
    if all(getattr(draft, name) is None for name in names) or unusable:
        return
    from pentatron.data.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(kind, model, None, vocab_file, merge_file)
    except UserError as error:
        draft.wrong["vocab_size"] = str(error)
        return
    draft.derive(f"tokenizer {model or vocab_file or kind}", vocab_size=tokenizer.vocab_size)


def _learn_timeout(draft: Draft, environment: Mapping[str, str]) -> None:
    """NCCL_TIMEOUT takes precedence over the setting, as the guides that name it expect."""
    name = "distributed_timeout_minutes"
    if "NCCL_TIMEOUT" not in environment:
        return
    seconds = timeout_seconds(environment)
    written = f"NCCL_TIMEOUT={environment['NCCL_TIMEOUT']}"
    if seconds is None:
        draft.notices.append(f"{written} has no effect: it must be a number of seconds above 0")
        return
    if draft.given(name):
        flag = table()[name].written(getattr(draft, name), draft.source(name))
        draft.notices.append(f"{flag} has no effect: the environment says {written} (seconds)")
    draft.assign(f"environment {written}", **{name: seconds / 60})
