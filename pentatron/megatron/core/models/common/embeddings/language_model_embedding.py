"""Word vectors and learned positions."""

from pentatron.models.causal_lm import Embedding as LanguageModelEmbedding

__all__ = ["LanguageModelEmbedding"]
