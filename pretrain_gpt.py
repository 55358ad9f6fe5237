"""GPT pretraining with Megatron's flags."""

from pentatron.cli.main import run_entry
from pentatron.config.entry import PRETRAIN_GPT

if __name__ == "__main__":
    run_entry(PRETRAIN_GPT)
