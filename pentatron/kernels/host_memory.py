"""Memory of the host that steps ask for, free, and ask for again.

glibc gives large blocks back to the system when they are freed; whoever asks for them again waits for their pages, thousands of them in a step
on a CPU. Kept, they are there: a step takes some hundredths less, and a process stays as large as its largest step.
"""

import ctypes

# glibc's numbers for them (malloc.h), and the largest block that comes from its heap, which it allows no more of.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK, _KEPT = 32 * 2**20, 2**30


def keep_freed_memory() -> bool:
    """For this process, from now on; whether there is a glibc to tell."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT))
