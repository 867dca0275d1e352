from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import once as module
from tests.once import once

CODE = """
    import sys, time
    from tests.once import once

    @once
    def make(what, *, number):
        with open(sys.argv[1], "a") as file:
            file.write(what)
        time.sleep(0.2)
        return {what: number}

    assert make("a", number=1) == {"a": 1}
    assert make("b", number=2) == {"b": 2}
    assert make("a", number=1) == {"a": 1}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(module.FOLDER, str(tmp_path / "results"))
    return tmp_path


def test_several_processes_make_it_once(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(CODE), str(folder / "made")]
    workers = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    assert (folder / "made").read_text() == "ab"


def test_what_failed_is_made_again() -> None:
    calls = []

    @once
    def make() -> int:
        calls.append(1)
        assert len(calls) > 1, "not yet"
        return 7

    with pytest.raises(AssertionError, match="not yet"):
        make()
    assert (make(), make(), len(calls)) == (7, 7, 2)
