"""Compares kernels with plain torch, on a GPU or on a CPU with TRITON_INTERPRET=1; else skipped."""
