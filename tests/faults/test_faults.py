"""The quick cases of the fault matrix; `make faults` runs all of them and writes docs/faults.md."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cases import Case
from tests.faults.catalogue import cases
from tests.faults.commands import Zygote
from tests.faults.lab import Lab, References


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    zygote = Zygote()
    yield References(tmp_path_factory.mktemp("undisturbed"), zygote)
    zygote.close()


# Few tests with many cases, since every pytest process needs its own zygote and undisturbed runs.
@pytest.mark.parametrize("of_checkpoints", [True, False], ids=["damaged checkpoints", "all others"])
def test_faults_end_as_they_should(of_checkpoints: bool, references: References, tmp_path: Path) -> None:
    chosen = [c for c in cases() if c.quick and (c.group == "damaged checkpoint") is of_checkpoints]
    wrong = "\n\n".join(
        text for case in chosen for text in problems(case, Lab(tmp_path / case.name, references))
    )
    assert not wrong, wrong


def problems(case: Case, lab: Lab) -> list[str]:
    outcome = case.run(lab)
    found = list(outcome.problems)
    if outcome.detected == case.control:
        found.append("noticed without the protection" if case.control else "accepted in silence")
    return [f"{case.name}: {text}" for text in found]


def test_the_matrix_is_whole() -> None:
    found = cases()
    assert len({case.name for case in found}) == len(found) >= 40
    assert any(case.control and case.quick for case in found), "the table can show that nothing was noticed"
