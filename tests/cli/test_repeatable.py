"""Tests `--deterministic-mode`."""

import torch

from pentatron.cli.worker_errors import nondeterminism_error


def test_a_kernel_that_cannot_repeat_its_result_is_one_sentence() -> None:
    """Turns torch's error about a nondeterministic kernel, here one of the CPU, into one sentence."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        torch.zeros(4).put_(torch.tensor([0]), torch.tensor([1.0]))
        raised = None
    except RuntimeError as error:
        raised = error
    finally:
        torch.use_deterministic_algorithms(before)
    assert raised is not None
    told = nondeterminism_error(raised)
    assert (
        told is not None
        and str(told).startswith("--deterministic-mode: put_ does not have")
        and "\n" not in str(told)
    )
    assert nondeterminism_error(RuntimeError("another one")) is None
