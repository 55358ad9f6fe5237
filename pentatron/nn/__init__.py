"""Layers.

Dimensions in the names of tensors: B batch, S sequence, D hidden, N heads, K key/value heads, H head width, F
MLP width, V vocabulary, T tokens, E experts.
"""
