"""Commands about files: what the system says of one of them is a sentence, not a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

from pentatron.config.errors import UserError, file_sentence


@contextmanager
def file_errors_told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        # The reader of our output has left, which is no file's fault.
        raise
    except OSError as error:
        raise UserError(file_sentence(error)) from error
