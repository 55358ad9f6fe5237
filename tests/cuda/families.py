"""Compares families with `transformers`, both on the GPU."""

import contextlib

from tests.cuda.trials import LOSS_MASK, ROPE_BASE, Found, Rows, unmasked
from tests.hf.families import CASES


def beside_transformers(name: str, more: str, device: str) -> Rows:
    # Imported here, because it imports `transformers`.
    from tests.hf.oracle import Gaps, compare, run

    case = next(case for case in CASES if case.name == name)

    def judged(words: str = "", mistake: str = "") -> Gaps:
        with unmasked() if mistake == LOSS_MASK else contextlib.nullcontext():
            found = run(case, f"--micro-batch-size 4 {more} {words}", 1, device=device)
        return compare(case, found, device)

    found = judged()
    controls = {LOSS_MASK: max(judged(mistake=LOSS_MASK).shares.values())}
    base = case.settings.get("rope_parameters", {}).get("rope_theta")
    if base:
        controls[ROPE_BASE] = max(judged(f"--rotary-base {base * 1.01}").shares.values())
    note = "; ".join(found.failures)
    return {name: Found(max(found.shares.values()), controls, note)}
