"""Pentatron trains large language models with five-way parallelism in pure Python on PyTorch."""

__version__ = "0.1.0"
