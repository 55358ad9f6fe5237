"""Commands about files: what the system says of one of them is a sentence, not a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

from pentatron.errors import UserError, file_sentence
from pentatron.monitor.terminal import OutputLost


@contextmanager
def file_errors_told() -> Iterator[None]:
    try:
        yield
    except OutputLost:
        # Not about a file of the command.
        raise
    except OSError as error:
        raise UserError(file_sentence(error)) from error
