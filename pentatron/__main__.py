"""`python -m pentatron` is the same as `pentatron`."""

import contextlib
import os
import sys


def main() -> int:
    try:
        # Here, so that Ctrl-C is answered with a sentence from the first moment on.
        from pentatron.cli.main import main as command
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            os.write(2, b"pentatron: stopped before anything was done\n")
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
