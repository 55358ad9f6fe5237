"""Builds the checked configuration of a run from its command line, environment and checkpoint."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.cli import checkpoint_settings
from pentatron.cli.environment import RankInfo, find_worker, nccl_timeout_seconds, nested_launcher_notices
from pentatron.cli.worker import current_attempt, current_worker
from pentatron.data.indexed import missing_pairs_message
from pentatron.errors import ConfigError, UserError
from pentatron.launch.machine import usable_cores
from pentatron.settings import data_paths
from pentatron.settings.entry_points import EntryPoint
from pentatron.settings.resolve import Resolved, derived_settings, gather, problems_independent_of, resolve
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import Draft, ProcessFacts, Start, is_unset, start_of
from pentatron.settings.training_rules import first_text_file, is_weight
from pentatron.supervise.attempts import FIRST_ATTEMPT, Attempt

# Limits of file systems, in bytes. The path leaves room for the files that a run creates below its folder.
_LONGEST_NAME, _LONGEST_PATH = 255, 3800


@dataclass(frozen=True)
class Prepared:
    """The resolved configuration of a run, and how it is started."""

    resolved: Resolved
    facts: ProcessFacts
    worker: RankInfo | None
    attempt: Attempt
    start: Start


def prepare(
    words: Sequence[str],
    entry: EntryPoint,
    planned: ProcessFacts | None = None,
    starts: bool = False,
    own_data: bool = False,
) -> Prepared:
    """Parses, completes and checks the configuration; raises every problem at once.

    Args:
        planned: the processes of a job on other machines, instead of those of this machine.
        starts: whether the run is about to start, so that its data files must exist.
        own_data: whether the program of the user provides the data.
    """
    worker = None if planned else find_worker(os.environ)
    draft = gather(words, entry)
    _check_folder_names(draft)
    download_tokenizer(draft)
    set_vocabulary_size(draft)
    _use_nccl_timeout(draft, os.environ)
    if worker is not None:
        draft.notices += nested_launcher_notices(os.environ)
    if draft.job_id is None and "SLURM_JOB_ID" in os.environ:
        draft.derive("environment SLURM_JOB_ID", job_id=os.environ["SLURM_JOB_ID"])
    facts = planned or _local_facts(draft, worker)
    threads = 0 if planned else threads_from_environment(facts)
    if threads and is_unset(draft.threads_per_process):
        draft.derive("environment OMP_NUM_THREADS", threads_per_process=threads)
    if starts and not own_data and worker is None:
        # Workers check this after the rendezvous, because a file may be missing on one machine only.
        _check_data_files(draft)
    attempt = FIRST_ATTEMPT
    if planned is None:
        attempt = current_attempt(os.environ, Path(derived_settings(draft, facts).run_dir))
    if attempt.restarted:
        # Even if the command says `--fresh`.
        draft.derive("started again after a failure", fresh=False)
        if not derived_settings(draft, facts).save_checkpoints:
            lost = "this command saves no checkpoint, so training starts at step 0"
            draft.notices.append(f"the job was restarted, and {lost}; add --save to keep checkpoints")
    start = start_of(derived_settings(draft, facts), draft.given("load"), entry.resumes or attempt.restarted)
    try:
        checkpoint_settings.adopt_checkpoint_settings(draft, facts, start)
    except UserError as error:
        if not draft.given("load"):
            raise
        loaded = checkpoint_settings.settings_from_checkpoint(draft)
        if others := problems_independent_of(draft, facts, loaded):
            raise ConfigError([str(error), *others]) from None
        raise
    if not own_data and not facts.launcher:
        # Workers of another launcher count after the rendezvous, for the same reason.
        count_epoch_samples(draft)
    return Prepared(resolve(draft, facts), facts, worker, attempt, start)


def _check_data_files(draft: Draft) -> None:
    """Marks data settings as wrong if their files do not exist."""
    if draft.mock_data or draft.corpus:
        # The rule about data sources reports that files are named as well.
        return
    evaluates = draft.eval_iters and (draft.eval_interval or draft.skip_train)
    for name in data_paths.NAMED if evaluates else data_paths.NAMED[:2]:
        words = getattr(draft, name) or ()
        if missing := _missing_conversations(words) if draft.sft else _missing_prefixes(words, name):
            draft.wrong[name] = missing


def _missing_prefixes(words: tuple[str, ...], name: str) -> str:
    try:
        return missing_pairs_message(data_paths.Blend.parse(words, all_settings()[name].flag).prefixes)
    except UserError:
        # The rule about blends reports the syntax error.
        return ""


def _missing_conversations(words: tuple[str, ...]) -> str:
    missing = next((Path(word) for word in words if not Path(word).exists()), None)
    # Weights are not files: the rule about conversations refuses them.
    if missing is None or any(is_weight(word) for word in words):
        return ""
    from pentatron.data.conversations import missing_file_message

    return missing_file_message(missing)


def count_epoch_samples(draft: Draft) -> None:
    """For `--epochs`: counts the samples of one pass over the training data, from its index files.

    Needs the sequence length. Marks `epochs` as wrong if the files cannot be read.
    """
    is_wrong = not draft.wrong.keys().isdisjoint(("seq_length", *data_paths.NAMED))
    if draft.epochs is None or is_wrong or not data_paths.training_files_flag(draft):
        return
    # A rule refuses text files that are not tokenized.
    if data_paths.is_counted_in_run(draft) or first_text_file(draft.data_path or ()):
        return
    from pentatron.data.gpt_dataset import count_epoch_samples

    try:
        if not data_paths.why_no_epochs(draft):
            draft.epoch_samples = count_epoch_samples(*data_paths.training_files(draft), draft.seq_length)
    except UserError as error:
        draft.wrong["epochs"] = str(error)


def _check_folder_names(draft: Draft) -> None:
    """Raises if the file system cannot hold a folder of the run, or UTF-8 files cannot hold its name."""
    for setting in ("run_dir", "save"):
        name = getattr(draft, setting)
        if not isinstance(name, str):
            continue
        flag = all_settings()[setting].flag
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UserError(f"{flag} {name!a} is not UTF-8; choose another name") from None
        longest = max(len(part.encode()) for part in Path(name).parts or (name,))
        if longest > _LONGEST_NAME or len(os.fsencode(Path(name).absolute())) > _LONGEST_PATH:
            most = f"a name has at most {_LONGEST_NAME} bytes, and a path {_LONGEST_PATH}"
            raise UserError(f"{flag} {name[:40]}... is too long: {most}; choose a shorter one")


def threads_from_environment(facts: ProcessFacts) -> int:
    """Returns OMP_NUM_THREADS of the user; 0 if it is unset, or the 1 that torchrun sets by default."""
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    threads = int(text) if text.isascii() and text.isdigit() else 0
    return 0 if threads == 1 and facts.launcher else threads


def _local_facts(draft: Draft, worker: RankInfo | None) -> ProcessFacts:
    """Returns the processes and cores of this machine: by default one process per GPU, or one on the CPU."""
    cores = usable_cores()
    if worker is not None:
        # The name is for other launchers: pentatron's own one is this program.
        name = "" if current_worker() is not None else worker.launcher
        return ProcessFacts(worker.world_size, worker.local_size, cores, name, "MASTER_ADDR" in os.environ)
    processes = draft.nproc_per_node
    if processes is None and draft.device != "cpu":
        import torch

        processes = torch.cuda.device_count()
    processes = 1 if processes is None else processes
    # A number below 1 is refused later, together with all other problems.
    return ProcessFacts(max(1, processes), max(1, processes), cores)


def download_tokenizer(draft: Draft) -> None:
    """Downloads the tokenizer if `--tokenizer-model` names a model of the hub."""
    name = draft.tokenizer_model
    if name is None or Path(name).exists():
        return
    try:
        checkpoint_settings.replace_hub_name(draft, "tokenizer_model")
    except UserError as error:
        # Reported as one problem, although the vocabulary size may be unknown without the tokenizer.
        open_size = is_unset(draft.vocab_size) and is_unset(draft.padded_vocab_size)
        wrong = "vocab_size" if open_size else "tokenizer_model"
        draft.wrong[wrong] = f"Tokenizer not found: {error}; check --tokenizer-model"


def set_vocabulary_size(draft: Draft) -> None:
    """Takes the vocabulary size from the tokenizer that is named."""
    if not is_unset(draft.vocab_size) or not is_unset(draft.padded_vocab_size):
        return
    kind, model, vocab_file, merge_file = (getattr(draft, name) for name in checkpoint_settings.TOKENIZER)
    unusable = all_settings()["tokenizer_type"].refuses(kind) or "vocab_size" in draft.wrong
    if unusable or all(getattr(draft, name) is None for name in checkpoint_settings.TOKENIZER):
        return
    from pentatron.data.tokenizer import TokenizerSettings

    try:
        tokenizer = TokenizerSettings(kind, model, None, vocab_file, merge_file).load()
    except UserError as error:
        draft.wrong["vocab_size"] = str(error)
        return
    draft.derive(f"tokenizer {model or vocab_file or kind}", vocab_size=tokenizer.vocab_size)


def _use_nccl_timeout(draft: Draft, environment: Mapping[str, str]) -> None:
    """Takes the timeout from NCCL_TIMEOUT, which takes precedence over the setting, as guides expect."""
    name = "distributed_timeout_minutes"
    if "NCCL_TIMEOUT" not in environment:
        return
    seconds = nccl_timeout_seconds(environment)
    written = f"NCCL_TIMEOUT={environment['NCCL_TIMEOUT']}"
    if seconds is None:
        draft.notices.append(f"{written} has no effect: it must be a number of seconds above 0")
        return
    if draft.given(name):
        flag = all_settings()[name].written(getattr(draft, name), draft.source(name))
        draft.notices.append(f"{flag} has no effect: the environment sets {written} (seconds)")
    draft.assign(f"environment {written}", **{name: seconds / 60})
