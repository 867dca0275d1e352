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
NETWORK = """
from evertrain.embedded import kernel
kernel.become_own_user_namespace()
kernel.unshare(kernel.CLONE_NEWNET)
"""


@dataclass(frozen=True)
class User:
    """Whoever starts a cluster."""

    folder: Path
    """Theirs."""
    program: Sequence[str]
    """`evertrain`, as they start it."""

    @property
    def path(self) -> str:
        """On it their Python comes first."""
        return f"{Path(self.program[-3]).parent}{os.pathsep}{os.environ['PATH']}"

    @property
    def python(self) -> Sequence[str]:
        return self.program[:-2]

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
    base = interpreter_for(NOBODY, os.path.realpath(sys.executable), shutil.which(name, path=os.defpath))
    if not base or not _runs(base, "-m", "venv", "--without-pip", str(folder / "venv")):
        pytest.skip(f"there is no {name} that an ordinary user may run")
    ours = Path(yaml.__file__).parents[1]  # where everything is that is installed
    (folder / "venv" / "lib" / name / "site-packages" / "ours.pth").write_text(
        f"{ROOT / 'src'}\nimport site; site.addsitedir({str(ours)!r})\n"
    )
    made = str(folder / "venv" / "bin" / "python")
    if not _runs(made, "-c", "import evertrain.embedded.cluster"):
        pytest.skip("an ordinary user may not read our packages")
    if not _runs(made, "-c", NETWORK):
        pytest.skip("an ordinary user may not have namespaces for networks")
    return made


def interpreter_for(user: int, *candidates: str | None) -> str:
    """The first of these that the user may run; empty if it is none."""
    for candidate in filter(None, candidates):
        with contextlib.suppress(OSError):
            command = [candidate, "-I", "-S", "-c", "import array, json"]
            if subprocess.run(command, user=user, stderr=subprocess.DEVNULL).returncode == 0:
                return candidate
    return ""


def _runs(*command: str) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *command], cwd="/", stdin=subprocess.DEVNULL, capture_output=True
    )
    return done.returncode == 0
