"""Checkpoints as Megatron-LM has them: what its tensors are called, reading its files apart, writing them."""
