"""Reads and writes checkpoints of Megatron-LM."""
