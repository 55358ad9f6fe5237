"""Needs of data, validation, tokenizers and conversations."""

from pentatron.config.blend import NAMED, Blend, counted_by_the_run, names_files, without_epochs
from pentatron.config.needs.need import Settings, unless
from pentatron.errors import UserError


def reader_processes(s: Settings) -> str:
    """Processes that read batches ahead."""
    none = s.num_workers == 0
    return "there are no reader processes (--num-workers 0), so nothing is read ahead" if none else ""


def one_data_source(s: Settings) -> str:
    """Data that is split by shares."""
    if s.train_data_path:
        return "each split has files of its own (--train-data-path), so nothing is split"
    if s.mock_data:
        return "mock data is split in three equal parts"
    made = not s.data_path and not s.corpus
    return "synthetic data is not split, so this changes nothing" if made else ""


def a_corpus(s: Settings) -> str:
    """A corpus."""
    return "there is no --corpus, so this changes nothing" if not s.corpus else ""


def synthetic_data(s: Settings) -> str:
    """Synthetic samples."""
    sources = {
        "--corpus": s.corpus,
        "--data-path": s.data_path,
        "--train-data-path": s.train_data_path,
        "--mock-data": s.mock_data,
    }
    named = next((flag for flag, value in sources.items() if value), "")
    return f"the data comes from {named}, so no synthetic samples are made" if named else ""


def countable_epochs(s: Settings) -> str:
    """Data whose samples are counted before the run starts."""
    if s.is_synthetic or s.epoch_samples is not None:
        return ""
    if counted_by_the_run(s):
        return "how many steps they are is known when the run has tokenized its data"
    if not (why := without_epochs(s)) and s.facts.launcher:
        return "how many steps they are is known when the run has counted its data"
    return f"{why or 'the data is not read here'}; --train-iters {s.train_iters} decides"


def evaluations(s: Settings) -> str:
    """Evaluations during training."""
    if s.eval_interval == 0:
        return ""
    if s.skip_train:
        return "nothing is trained (--skip-train); there is one evaluation"
    if s.eval_iters == 0:
        return "there are no validation steps (--eval-iters 0)"
    return no_validation_data(s)


def evaluation_steps(s: Settings) -> str:
    """Evaluations of a chosen number of steps."""
    if s.eval_iters == 0:
        return ""
    if s.eval_interval == 0 and not s.skip_train:
        return "there is no validation (--eval-interval 0)"
    if s.full_validation and not (s.is_synthetic or s.sft):
        return "every validation sample is read once (--full-validation)"
    return no_validation_data(s)


def no_validation_data(s: Settings) -> str:
    """Why there is no validation data, or an empty text."""
    if s.train_data_path:
        return "" if s.valid_data_path else "there is no --valid-data-path, so nothing is validated"
    shares = [float(share) for share in s.split.split(",")]
    no_share = len(shares) < 2 or shares[1] == 0
    from_files = s.data_path or s.corpus
    return f"--split {s.split} leaves nothing to validate" if from_files and no_share else ""


def a_test(s: Settings) -> str:
    """An evaluation on the test set."""
    return "nothing is evaluated (--eval-iters 0), so these files are not read" if s.eval_iters == 0 else ""


def a_tokenizer(s: Settings) -> str:
    """A checkpoint and a tokenizer to continue text with."""
    if not s.save_checkpoints:
        return "the text is continued with the last checkpoint, and none is saved"
    named = s.corpus or (names_files(s) and (s.tokenizer_type or s.tokenizer_model))
    return "" if named else "no tokenizer is known, so no text can be continued"


def a_sample(s: Settings) -> str:
    """A prompt to continue."""
    return "there is no --sample-prompt to continue" if s.sample_prompt is None else a_tokenizer(s)


def text_or_ids(s: Settings) -> str:
    """A tokenizer that is used."""
    if s.corpus:
        return "the corpus gets a tokenizer of its own"
    used = names_files(s) or s.source("vocab_size").startswith("derived: tokenizer")
    return "" if used else "synthetic data is tokens already, and --vocab-size is given"


def gpt2_tokenizer(s: Settings) -> str:
    """The GPT-2 tokenizer."""
    kind = s.tokenizer_type or ("HuggingFaceTokenizer" if s.tokenizer_model else None)
    if kind is not None and kind != "GPT2BPETokenizer":
        return f"only GPT2BPETokenizer reads it, and the tokenizer is a {kind}"
    return text_or_ids(s)


def a_validation_set(s: Settings) -> str:
    """A validation set that ends."""
    if not s.full_validation:
        return ""
    if s.is_synthetic or s.sft:
        kind = "conversations are" if s.sft else "synthetic data is"
        return f"{kind} validated by --eval-iters steps"
    never = s.eval_interval == 0 and not s.skip_train
    if never or s.eval_iters == 0:
        return "there is no validation (--eval-interval or --eval-iters is 0)"
    return no_validation_data(s)


def a_kept_order(s: Settings) -> str:
    """Samples in an order that is kept on disk."""
    return "synthetic samples need no order that could be kept" if s.is_synthetic else ""


def a_choice_of_order(s: Settings) -> str:
    """Data whose order can be chosen."""
    if s.dataloader_type != "cyclic" or not (s.is_synthetic or s.sft):
        return ""
    what = "conversations" if s.sft else "synthetic samples"
    return f"{what} are always shuffled anew in every epoch"


def weighted_data(s: Settings) -> str:
    """Data with weights."""
    try:
        weighted = any(Blend.parse(getattr(s, name)).weights for name in NAMED if getattr(s, name))
    except UserError:
        return ""
    return "" if weighted else "no data has a weight, so nothing is built with a surplus"


def documents(s: Settings) -> str:
    """Text whose documents end at end-of-document tokens."""
    if s.corpus or s.data_path or s.mock_data:
        return documents_of_conversations(s)
    return "synthetic samples are one document each, so this changes nothing"


def documents_of_conversations(s: Settings) -> str:
    """Why flags about ends of documents have no effect on conversations, or an empty text."""
    return (
        "with --sft a conversation is a document by itself and its loss is on the answers, so this changes nothing"
        if s.sft
        else ""
    )


CONVERSATIONS = unless(lambda s: s.sft, "there are no conversations (--sft), so this changes nothing")
TEMPLATE = (
    CONVERSATIONS,
    unless(
        lambda s: s.sft_tokenizer_prompt_format != "identity",
        "texts follow each other as they are (--sft-tokenizer-prompt-format identity)",
    ),
)
