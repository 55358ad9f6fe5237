"""`python -m pentatron` is the same as `pentatron`."""

import sys

from pentatron.cli.main import main

sys.exit(main())
