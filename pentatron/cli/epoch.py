"""How many samples one pass over the training data has, read from its index files before anything starts."""

from pentatron.config.blend import (
    NAMED,
    counted_by_the_run,
    names_files,
    trained_files,
    without_epochs,
)
from pentatron.config.draft import Draft
from pentatron.config.sft_rules import named_text
from pentatron.errors import UserError


def learn_epoch(draft: Draft) -> None:
    """For `--epochs`, once the length of a sequence is settled; what cannot be read is wrong."""
    is_wrong = not draft.wrong.keys().isdisjoint(("seq_length", *NAMED))
    if draft.epochs is None or not names_files(draft) or is_wrong or counted_by_the_run(draft):
        return
    if named_text(draft.data_path or ()):
        # Of which a rule says what to do with it.
        return
    from pentatron.data.epoch_of_files import samples_of_files

    try:
        if not without_epochs(draft):
            draft.epoch_samples = samples_of_files(*trained_files(draft), draft.seq_length)
    except UserError as error:
        draft.wrong["epochs"] = str(error)
