"""Why a setting of data, validation or tokenizers has nothing to act on."""

from collections.abc import Callable

from pentatron.config.data_sources import NAMED, Blend, counted_by_the_run, names_files, without_epochs
from pentatron.config.draft import Draft, Facts
from pentatron.config.run import table
from pentatron.errors import UserError


def _no_readers(draft: Draft, facts: Facts) -> str:
    nobody = draft["num_workers"] == 0
    return "there are no reader processes (--num-workers 0), so nothing is read ahead" if nobody else ""


def _not_split(draft: Draft, facts: Facts) -> str:
    if draft["train_data_path"]:
        return "each split has files of its own (--train-data-path), so nothing is split"
    if draft["mock_data"]:
        return "mock data is split in three equal parts"
    made = not draft["data_path"] and not draft["corpus"]
    return "synthetic data is not split, so this changes nothing" if made else ""


def _no_corpus(draft: Draft, facts: Facts) -> str:
    return "there is no --corpus, so this changes nothing" if not draft["corpus"] else ""


def _other_data(draft: Draft, facts: Facts) -> str:
    named = [table()[n].flag for n in ("corpus", "data_path", "train_data_path", "mock_data") if draft[n]]
    return f"the data comes from {named[0]}, so no synthetic samples are made" if named else ""


def _unknown_epochs(draft: Draft, facts: Facts) -> str:
    if draft.is_synthetic or draft.epoch is not None:
        return ""
    if counted_by_the_run(draft):
        return "how many steps they are is known when the run has tokenized its data"
    if not (why := without_epochs(draft)) and facts.launcher:
        return "how many steps they are is known when the run has counted its data"
    return f"{why or 'the data is not read here'}; --train-iters {draft['train_iters']} decides"


def _eval_interval(draft: Draft, facts: Facts) -> str:
    if draft["eval_interval"] == 0:
        return ""
    if draft["skip_train"]:
        return "nothing is trained (--skip-train); there is one evaluation"
    if draft["eval_iters"] == 0:
        return "there are no validation steps (--eval-iters 0)"
    return no_validation_data(draft)


def _eval_iters(draft: Draft, facts: Facts) -> str:
    if draft["eval_iters"] == 0:
        return ""
    if draft["eval_interval"] == 0 and not draft["skip_train"]:
        return "there is no validation (--eval-interval 0)"
    if draft["full_validation"] and not (draft.is_synthetic or draft["sft"]):
        return "every validation sample is read once (--full-validation)"
    return no_validation_data(draft)


def no_validation_data(draft: Draft) -> str:
    if draft["train_data_path"]:
        return "" if draft["valid_data_path"] else "there is no --valid-data-path, so nothing is validated"
    shares = [float(share) for share in draft["split"].split(",")]
    no_share = len(shares) < 2 or shares[1] == 0
    from_files = draft["data_path"] or draft["corpus"]
    return f"--split {draft['split']} leaves nothing to validate" if from_files and no_share else ""


def _not_tested(draft: Draft, facts: Facts) -> str:
    return (
        "nothing is evaluated (--eval-iters 0), so these files are not read"
        if draft["eval_iters"] == 0
        else ""
    )


def _no_tokenizer(draft: Draft, facts: Facts) -> str:
    if not draft["save_checkpoints"]:
        return "the text is continued with the last checkpoint, and none is saved"
    named = draft["corpus"] or (names_files(draft) and (draft["tokenizer_type"] or draft["tokenizer_model"]))
    return "" if named else "no tokenizer is known, so no text can be continued"


def _no_sample(draft: Draft, facts: Facts) -> str:
    return (
        "there is no --sample-prompt to continue"
        if draft["sample_prompt"] is None
        else _no_tokenizer(draft, facts)
    )


def _tokenizer_unused(draft: Draft, facts: Facts) -> str:
    if draft["corpus"]:
        return "the corpus gets a tokenizer of its own"
    used = names_files(draft) or draft.source("vocab_size").startswith("derived: tokenizer")
    return "" if used else "synthetic data is tokens already, and --vocab-size is given"


def _gpt2_files_unused(draft: Draft, facts: Facts) -> str:
    kind = draft["tokenizer_type"] or ("HuggingFaceTokenizer" if draft["tokenizer_model"] else None)
    if kind is not None and kind != "GPT2BPETokenizer":
        return f"only GPT2BPETokenizer reads it, and the tokenizer is a {kind}"
    return _tokenizer_unused(draft, facts)


def _endless_validation(draft: Draft, facts: Facts) -> str:
    if not draft["full_validation"]:
        return ""
    if draft.is_synthetic or draft["sft"]:
        kind = "conversations are" if draft["sft"] else "synthetic data is"
        return f"{kind} validated by --eval-iters steps"
    never = draft["eval_interval"] == 0 and not draft["skip_train"]
    if never or draft["eval_iters"] == 0:
        return "there is no validation (--eval-interval or --eval-iters is 0)"
    return no_validation_data(draft)


def _no_order(draft: Draft, facts: Facts) -> str:
    return "synthetic samples need no order that could be kept" if draft.is_synthetic else ""


def _always_cyclic(draft: Draft, facts: Facts) -> str:
    if draft["dataloader_type"] != "cyclic" or not (draft.is_synthetic or draft["sft"]):
        return ""
    what = "conversations" if draft["sft"] else "synthetic samples"
    return f"{what} are always shuffled anew in every epoch"


def _no_weights(draft: Draft, facts: Facts) -> str:
    try:
        weighted = any(Blend.parse(draft[name]).weights for name in NAMED if draft[name])
    except UserError:
        return ""
    return "" if weighted else "no data has a weight, so nothing is built with a surplus"


IDLE_OF_DATA: dict[str, Callable[[Draft, Facts], str]] = {
    "prefetch_factor": _no_readers,
    "split": _not_split,
    "corpus_bytes": _no_corpus,
    "dataset_size": _other_data,
    "epochs": _unknown_epochs,
    "eval_interval": _eval_interval,
    "eval_iters": _eval_iters,
    "test_data_path": _not_tested,
    "sample_prompt": _no_tokenizer,
    "sample_tokens": _no_sample,
    **dict.fromkeys(("tokenizer_type", "tokenizer_model"), _tokenizer_unused),
    **dict.fromkeys(("vocab_file", "merge_file"), _gpt2_files_unused),
    "data_cache_path": _no_order,
    "full_validation": _endless_validation,
    "dataloader_type": _always_cyclic,
    "mid_level_dataset_surplus": _no_weights,
}
