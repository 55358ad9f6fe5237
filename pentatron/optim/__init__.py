"""The optimizer, its learning rate and gradient clipping."""
