"""The wheels, installed and used by the lines of MindCluster's documents as they are written there."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests.taskd.documents import DOCKERFILE_MINDSPORE as MINDSPORE
from tests.taskd.documents import DOCKERFILE_PYTORCH as PYTORCH
from tests.taskd.documents import PRELOAD as TRAINING
from tests.taskd.native import PLACE, ROOT
from tools.wheels import NAMES, renamed

DEPENDENCIES = ["grpcio", "protobuf", "msgspec", "PyYAML", "typing_extensions"]
if sys.version_info < (3, 11):
    DEPENDENCIES += ["taskgroup", "exceptiongroup", "tomli"]
INSTALLED = [found.metadata["Name"] for found in importlib.metadata.distributions()]
TORCHS = ["numpy", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec", "setuptools"]
TORCHS += [name for name in INSTALLED if name.startswith(("nvidia-", "cuda-", "triton"))]

USE = """
cat /proc/self/maps | grep --count --fixed-strings "$TASKD_SO_PATH"
git --version > /dev/null
python - <<'END'
import ctypes, importlib.metadata, os, subprocess, sys
import taskd, mindio_ttp.framework_ttp
from taskd.api import init_taskd_manager, start_taskd_manager
from taskd.python.cython_api.cython_api import lib
from taskd.python.utils.ip import pre_handle_ip
from taskd.python.utils.validator import StringValidator
assert lib is not None and lib._name == os.environ["LD_PRELOAD"].rstrip(":"), lib
assert taskd.__version__ == importlib.metadata.version("taskd") == importlib.metadata.version("mindio_ttp")
crash = "import ctypes; ctypes.CDLL(None).taskd_set_step(ctypes.c_int64(7)); ctypes.string_at(8)"
process = subprocess.Popen([sys.executable, "-c", crash], env={**os.environ, "TASKD_CRASH_DIR": os.getcwd()})
process.wait()
from evertrain.taskd.native.crash import cause, read
print(cause(process.returncode, read(".", process.pid)).words.replace(str(process.pid), "PID"))
END
"""
TORCHRUN = """
echo 'import os; print("trained as rank", os.environ["RANK"])' > train.py
python -m torch.distributed.run --nproc_per_node 1 --master_addr 127.0.0.1 --master_port 0 train.py
python -c 'import sys, torch.distributed.run; print("taskd.python.adaptor.patch" in sys.modules)'
"""


def copy_of_the_sources(target: Path) -> Path:
    """A build writes beside what it builds."""
    target.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target / name)
    shutil.copytree(ROOT / "src", target / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so"))
    return target


def build(sources: Path, **variables: str) -> dict[str, Path]:
    """As `make wheels` does."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=sources, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (sources / "dist").iterdir()
    return {"evertrain": wheel, **{name: renamed(wheel, name) for name in NAMES}}


def environment_with_dependencies(target: Path, *others: str) -> Path:
    """A fresh one, which has the packages that an index would bring, but not ours."""
    subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
    (packages,) = target.glob("lib/python3*/site-packages")
    for name in (*DEPENDENCIES, *others):
        files = importlib.metadata.distribution(name).files or []
        for part in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (packages / part).exists():
                (packages / part).symlink_to(importlib.metadata.distribution(name).locate_file(part))
    return target


def add_torch(place: Path) -> Path:
    """With a run.py of its own, which may be changed; the rest is the one that is installed here."""
    (packages,) = place.glob("lib/python3*/site-packages")
    files = importlib.metadata.distribution("torch").files or []
    for part in {file.parts[0] for file in files} - {"..", "__pycache__", "torch"}:
        if not (packages / part).exists():
            (packages / part).symlink_to(importlib.metadata.distribution("torch").locate_file(part))
    installed = Path(torch.__file__).parent
    for folder, own in ((installed, "distributed"), (installed / "distributed", "run.py")):
        copy = packages / folder.relative_to(installed.parent)
        copy.mkdir()
        for child in folder.iterdir():
            if child.name not in (own, "__pycache__"):
                (copy / child.name).symlink_to(child)
    run = packages / "torch/distributed/run.py"
    shutil.copy(installed / "distributed/run.py", run)
    return run


def shell(script: str, folder: Path, place: Path, wheels: dict[str, Path]) -> subprocess.CompletedProcess[str]:
    unwanted = {"PYTHONPATH", "LD_PRELOAD", "VIRTUAL_ENV", "TASKD_LOG_PATH", "PIP_FIND_LINKS", "MINDX_TASK_ID"}
    keep = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment = {
        **keep,
        "PATH": f"{place}/bin:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "TASKD_WHL": str(wheels["taskd"]),
        "MINDIO_TTP_PKG": str(wheels["mindio_ttp"]),
        "TASKD_LOG_STDOUT": "False",
    }
    folder.mkdir()
    done = subprocess.run(
        ["bash", "-c", "set -e\n" + script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_the_documented_lines(tmp_path: Path) -> None:
    wheels = build(copy_of_the_sources(tmp_path / "sources"))
    place = environment_with_dependencies(tmp_path / "environment", *TORCHS)
    run = add_torch(place)
    done = shell(PYTORCH + TRAINING + USE + TORCHRUN, tmp_path / "cwd", place, wheels)
    assert "ld.so" not in done.stderr
    maps, words, trained, patched = done.stdout.splitlines()[-4:]
    assert int(maps) > 0
    assert words == "killed by SIGSEGV (address not mapped) at 0x8 in the main thread of process PID, step 7"
    assert (trained, patched) == ("trained as rank 0", "True")
    assert "\nimport taskd.python.adaptor.patch\nimport os\n" in run.read_text()
    assert "libtaskd.so loaded successfully" in (tmp_path / "cwd/taskd_log/taskd.log").read_text()
    assert "import taskd" not in Path(torch.__file__).with_name("distributed").joinpath("run.py").read_text()


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_the_lines_for_mindspore_and_a_newer_version_of_both(tmp_path: Path) -> None:
    wheels = build(copy_of_the_sources(tmp_path / "sources"))
    place = environment_with_dependencies(tmp_path / "environment")
    again = MINDSPORE.replace("install", "install --force-reinstall --no-deps")
    done = shell(MINDSPORE + again + TRAINING + USE, tmp_path / "cwd", place, wheels)
    assert "killed by SIGSEGV" in done.stdout.splitlines()[-1]


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_without_a_compiler_there_are_wheels_without_the_library(tmp_path: Path) -> None:
    wheels = build(copy_of_the_sources(tmp_path / "sources"), CC=str(tmp_path / "no-compiler"))
    for wheel in wheels.values():
        assert wheel.name.endswith("-py3-none-any.whl")
        with zipfile.ZipFile(wheel) as archive:
            assert str(PLACE) not in archive.namelist()
            assert "taskd/python/cython_api/cython_api.py" in archive.namelist()
    place = environment_with_dependencies(tmp_path / "environment")
    use = "python -c 'from taskd.python.cython_api.cython_api import lib; import taskd; print(taskd.__file__, lib)'"
    done = shell(MINDSPORE + TRAINING + use, tmp_path / "cwd", place, wheels)
    (packages,) = place.glob("lib/python3*/site-packages")
    assert done.stdout.splitlines()[-1] == f"{packages}/taskd/__init__.py None"
    assert "cannot be preloaded" in done.stderr and "Traceback" not in done.stderr
    assert "libtaskd.so loaded failed: " in (tmp_path / "cwd/taskd_log/taskd.log").read_text()
