"""Torch-free arithmetic: ranks and axes, batch sizes, divisors."""
