"""Lists the values of `--model-size` for the loader `llama_mistral` of convert.py.

Each has its `model_type` of config.json beside it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pentatron.cli.megatron_convert import MODEL_SIZES
from pentatron.cli.output import say

if __name__ == "__main__":
    say("\n".join(f"{size:<10} {model_type}" for size, model_type in MODEL_SIZES.items()))
