"""How many samples one pass over the training data has, read from its index files before anything starts."""

from pentatron.config.data_sources import NAMED, Blend, counted_by_the_run, names_files, without_epochs
from pentatron.config.draft import Draft
from pentatron.config.errors import UserError


def learn_epoch(draft: Draft, elsewhere: bool = False) -> None:
    """For `--epochs`, once the length of a sequence is settled; what cannot be read is wrong. A job that runs `elsewhere` may have data
    that is not here, and counts it there; here a number of steps will do."""
    is_wrong = not draft.wrong.keys().isdisjoint(("seq_length", *NAMED))
    if draft["epochs"] is None or not names_files(draft) or is_wrong:
        return
    if counted_by_the_run(draft):
        return
    try:
        if not without_epochs(draft):
            draft.epoch = _samples(draft)
    except UserError as error:
        if not (elsewhere and draft.given("train_iters")):
            draft.wrong["epochs"] = str(error)


def _samples(draft: Draft) -> int:
    """Counted as the datasets count: whole sequences of each file, its training share alone where files are split."""
    from pentatron.data.gpt_dataset import documents_of, require_documents, require_text
    from pentatron.data.indexed import IndexedDataset
    from pentatron.data.sampling import epoch_samples

    split = draft["split"] if draft["data_path"] else None
    total = 0
    for prefix in Blend.parse(draft["data_path"] or draft["train_data_path"]).prefixes:
        # The run compares the index with its checksums itself.
        source = IndexedDataset(prefix, with_sidecar=False)
        if split is None:
            require_text(source)
            documents = range(len(source))
        else:
            documents = documents_of(source, split)[0] or range(0)
            require_documents(source, documents, split, "train")
        total += epoch_samples(source.sequence_lengths, documents, draft["seq_length"])
    return total
