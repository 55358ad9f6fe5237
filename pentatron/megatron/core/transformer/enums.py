"""Kinds of attention masks."""

from pentatron.nn.spec import AttnMaskType

__all__ = ["AttnMaskType"]
