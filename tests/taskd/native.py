"""libtaskd.so for tests, and processes that die with it."""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from evertrain.taskd.native import crash

ROOT = Path(__file__).resolve().parents[2]
PLACE = Path("taskd/python/cython_api/libs/libtaskd.so")
SOURCE = ROOT / "src/evertrain/taskd/native/libtaskd.c"
LIVING = Path(__file__).with_name("living.c")
DYING = Path(__file__).with_name("dying.py")


def build(target: Path) -> Path:
    """As the package builds it."""
    command = ["setup.py", "-q", "build_ext", "--build-lib", str(target), "--build-temp", str(target / "objects")]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    library = target / PLACE
    assert library.exists(), f"no library: is there a C compiler?\n{done.stdout}{done.stderr}"
    return library


def compiled(source: Path, target: Path, *options: str) -> Path:
    command = [*shlex.split(sysconfig.get_config_var("CC") or "cc"), *options, str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@dataclass(frozen=True)
class Death:
    pid: int
    returncode: int
    records: list[crash.Record]
    stderr: str
    stdout: str


def die(library: Path | None, directory: str | Path | None, *how: str, **variables: str) -> Death:
    """Runs dying.py with the library preloaded, recording into a directory; no core dump is left."""
    environment = {**os.environ, **variables}
    if library:
        environment["LD_PRELOAD"] = str(library)
    if directory:
        environment[crash.VARIABLE] = str(directory)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(DYING), *how],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
    )
    try:
        stdout, stderr = process.communicate(timeout=90)
    finally:
        process.kill()
    records = crash.read(directory, process.pid) if directory else []
    return Death(process.pid, process.returncode, records, stderr, stdout)
