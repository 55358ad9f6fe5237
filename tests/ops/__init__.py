"""Kernels against plain torch: on a GPU, or with TRITON_INTERPRET=1 on a CPU; elsewhere they are skipped."""
