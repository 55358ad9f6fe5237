"""Small configurations for tests."""

from pentatron.settings.entry_points import PRETRAIN_GPT
from pentatron.settings.model import TransformerConfig
from pentatron.settings.resolve import Resolved, gather, resolve
from pentatron.settings.settings import ProcessFacts

# std 0.1 and a large epsilon: default initialisation and Adam hide wrong gradients.
REVEALING = "--init-method-std 0.1 --adam-eps 1e-6 --lr 1e-2 --clip-grad 0.5 --weight-decay 0.1"
LLAMA = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 61 --dataset-size 64"
DEFAULT = f"{TINY} {REVEALING} --train-iters 5 --global-batch-size 8 --eval-interval 0"


def resolved(words: str = "", world_size: int = 1) -> Resolved:
    """Resolves `DEFAULT` and more flags as pretrain_gpt.py does, with checkpoints in the run folder."""
    draft = gather(f"--save-checkpoints {DEFAULT} {words}".split(), PRETRAIN_GPT)
    return resolve(draft, ProcessFacts(world_size, world_size, 1))


def model_config(words: str = "") -> TransformerConfig:
    return resolved(words).config.model
