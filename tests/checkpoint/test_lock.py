import os
import subprocess
import sys
from pathlib import Path

import pytest

from pentatron.checkpoint.lock import folder_lock
from pentatron.config.errors import UserError


def test_a_second_job_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with (
        folder_lock(tmp_path),
        pytest.raises(UserError, match=rf"process {os.getpid()} on .*--run-dir"),
        folder_lock(tmp_path),
    ):
        pass
    with folder_lock(tmp_path):
        pass


def test_the_lock_of_a_killed_job_is_free(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from pentatron.checkpoint.lock import folder_lock\n"
        "with folder_lock(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert (tmp_path / ".lock").exists()
    with folder_lock(tmp_path):
        pass
