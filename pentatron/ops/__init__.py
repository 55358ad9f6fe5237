"""Fused operations: Triton kernels on GPUs, with equivalents in torch operations for other devices."""
