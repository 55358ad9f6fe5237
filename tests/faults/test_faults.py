"""The quick cases of the fault matrix; `make faults` runs all of them and writes docs/faults.md."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cases import Case
from tests.faults.catalogue import cases
from tests.faults.commands import Zygote
from tests.faults.lab import Lab, References


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    zygote = Zygote()
    yield References(tmp_path_factory.mktemp("undisturbed"), zygote)
    zygote.close()


@pytest.mark.parametrize("case", [c for c in cases() if c.quick], ids=lambda case: case.name)
def test_a_fault_ends_as_it_should(case: Case, references: References, tmp_path: Path) -> None:
    outcome = case.run(Lab(tmp_path / "case", references))
    assert not outcome.problems, "\n".join(outcome.problems)
    assert outcome.detected != case.control, (
        "noticed without the protection" if case.control else "accepted in silence"
    )
    shutil.rmtree(tmp_path)


def test_the_matrix_is_whole() -> None:
    found = cases()
    assert len({case.name for case in found}) == len(found) >= 40
    assert any(case.control and case.quick for case in found), "the table can show that nothing was noticed"
