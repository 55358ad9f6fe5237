"""The loader `llama_mistral` of convert.py: the models that `--model-size` may name, and what they are in
config.json."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pentatron.cli.megatron_convert import MODEL_SIZES
from pentatron.cli.output import say

if __name__ == "__main__":
    say("\n".join(f"{size:<10} {model_type}" for size, model_type in MODEL_SIZES.items()))
