"""Kinds of models."""

import enum


class ModelType(enum.Enum):
    """Everything here is a decoder; the others have Megatron's names, to be refused by."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
    retro_encoder = 3
    retro_decoder = 4
