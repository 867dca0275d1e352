"""Who may import whom: that the contracts in pyproject.toml are kept and complete, and what they can't say."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "src" / "evertrain"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def loaded_by(statement: str) -> set[str]:
    """The modules in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVERTRAIN_")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
    return set(done.stdout.decode().split())


def test_the_contracts_are_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_every_part_is_under_a_contract() -> None:
    """A new part has to say where it belongs."""
    whole = [contract for contract in CONTRACTS if "layers" in contract and "containers" not in contract]
    layered = {part for contract in whole for layer in contract["layers"] for part in layer.split(" : ")}
    modules = {path.stem for path in SOURCES.glob("*.py") if not path.name.startswith("__")}
    packages = {path.parent.name for path in SOURCES.glob("*/__init__.py")}
    parts = {f"evertrain.{name}" for name in modules | packages}
    assert parts == layered


def test_every_part_of_the_cluster_is_under_a_contract() -> None:
    (inner,) = [contract for contract in CONTRACTS if contract.get("containers") == ["evertrain.embedded"]]
    layered = {part for layer in inner["layers"] for part in layer.split(" | ")}
    assert {path.stem for path in (SOURCES / "embedded").iterdir() if not path.name.startswith("__")} == layered


def test_the_command_line_loads_the_cluster_only_when_asked() -> None:
    packages = {"lightkube", "httpx2", "starlette", "uvicorn", "cryptography", "sqlite3"}
    assert not packages & loaded_by(
        "from evertrain.cli import main, up, run, down, objects, node, operator, clusterd, inject, noded"
    )


@pytest.mark.parametrize(
    "module",
    ["evertrain.cli.main", "evertrain.cli.demo", "evertrain.launch.launcher", "evertrain.mindio.controller.server"],
)
def test_the_launcher_stays_light(module: str) -> None:
    """It lives as long as the job, next to processes that need the memory; torch would add 250 MB and seconds."""
    assert not {"torch", "numpy", "evertrain.torch"} & loaded_by(f"import {module}")


def test_a_training_process_loads_nothing_of_the_control_plane() -> None:
    loaded = loaded_by("from evertrain.torch import Training")
    assert "evertrain.torch.training" in loaded
    assert not {name for name in loaded if name.startswith(("evertrain.launch", "evertrain.mindio.controller"))}


def test_the_package_itself_costs_nothing() -> None:
    assert not {"torch", "asyncio", "msgspec"} & loaded_by("import evertrain, evertrain.torch")


def test_nothing_is_unpickled() -> None:
    """Neither what comes over the network nor what lies in a file."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module.partition(".")[0]]
            assert not forbidden & set(names), f"{path} imports {names}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), f"{path} uses torch.load"
