"""An ordinary user of this machine, as whom tests that root runs start a cluster, too."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.embedded.up import ROOT, evertrain

NOBODY = 65534
"""Has no rights anywhere, and no files."""
AS_NOBODY = f"""
import os, sys
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True)
class User:
    """Whoever starts a cluster."""

    folder: Path
    """Theirs."""
    program: Sequence[str]
    """`evertrain`, as they start it."""

    def owns(self, folder: Path) -> None:
        """All that is in it."""
        if self.program[2] == AS_NOBODY:
            for place, _, files in os.walk(folder):
                for name in (place, *(os.path.join(place, file) for file in files)):
                    os.chown(name, NOBODY, NOBODY)


def oneself(folder: Path) -> User:
    """Whoever runs the tests."""
    return User(folder, evertrain())


@contextlib.contextmanager
def ordinary() -> Iterator[User]:
    """Skips where there is nobody else: the tests are run by an ordinary user, or our Python is for root alone."""
    if os.geteuid() != 0:
        pytest.skip("whoever runs the tests is an ordinary user already")
    folder = Path(tempfile.mkdtemp(prefix="evertrain-ordinary-"))
    try:
        os.chmod(folder, 0o755)
        os.chown(folder, NOBODY, NOBODY)
        yield User(folder, (sys.executable, "-c", AS_NOBODY, _python(folder), "-m", "evertrain.cli"))
    finally:
        shutil.rmtree(folder)


def _python(folder: Path) -> str:
    """One that they may run, in a virtual environment with all that ours has."""
    name = f"python3.{sys.version_info.minor}"
    for base in (os.path.realpath(sys.executable), f"/usr/bin/{name}", f"/usr/local/bin/{name}"):
        if _runs(base, "-m", "venv", "--without-pip", str(folder / "venv")):
            place = folder / "venv" / "lib" / name / "site-packages" / "ours.pth"
            ours = Path(yaml.__file__).parents[1]  # where everything is that is installed
            place.write_text(f"{ROOT / 'src'}\nimport site; site.addsitedir({str(ours)!r})\n")
            made = str(folder / "venv" / "bin" / "python")
            if _runs(made, "-c", "import evertrain.embedded.cluster"):
                return made
    pytest.skip(f"there is no {name} with our packages that an ordinary user may run")


def _runs(*command: str) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *command], cwd="/", stdin=subprocess.DEVNULL, capture_output=True
    )
    return done.returncode == 0
