"""GPT-like models."""

from pentatron.megatron.core.models.gpt.gpt_model import GPTModel

__all__ = ["GPTModel"]
