from __future__ import annotations

import builtins
import py_compile
from pathlib import Path

import pytest

from evertrain.taskd.manager import plugins
from evertrain.taskd.manager.orders import Signal

KEEP = """
from evertrain.taskd.manager.orders import ToController
from evertrain.taskd.manager.plugins import Plugin

class Keep(Plugin):
    def signal(self, signal):
        if signal.type == "killMaster":
            return [ToController("save_and_exit")]
"""


OWNER = "it must belong to root or to us, and nobody else may write to it"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """As errors."""
    return [each.message for each in caplog.records if each.levelname == "ERROR"]


def write(folder: Path, name: str, text: str, mode: int = 0o644) -> Path:
    file = folder / name
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_plugin_decides_what_it_wants_to_and_leaves_the_rest(tmp_path: Path) -> None:
    write(tmp_path, "keep.py", KEEP)
    write(tmp_path, "_helper.py", "not python")
    loaded = plugins.load(str(tmp_path))
    orders = loaded.ask("signal", Signal("killMaster"))
    assert orders is not None and [str(order.action) for order in orders] == ["save_and_exit"]  # type: ignore[union-attr]
    assert loaded.ask("signal", Signal("stopTrain")) is None


def test_a_plugin_that_fails_is_as_good_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "a.py", KEEP.replace("if signal", "1 / 0; signal").replace(":\n            return", "; return"))
    write(tmp_path, "b.py", KEEP)
    assert plugins.load(str(tmp_path)).ask("signal", Signal("killMaster"))
    assert "Keep: signal failed" in caplog.text


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        ("x = ", 0o644, "SyntaxError"),
        ("x = 1", 0o644, "no class derived from Plugin"),
        (KEEP, 0o666, "nobody else may write"),
        (KEEP, 0o664, "nobody else may write"),
        (KEEP + "    def __init__(self): 1 / 0", 0o644, "ZeroDivisionError"),
        ("raise SystemExit(3)", 0o644, "SystemExit"),
    ],
)
def test_a_file_that_is_no_plugin_is_left_out_with_the_reason(
    tmp_path: Path, text: str, mode: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = write(tmp_path, "bad.py", "import builtins; builtins.ran = True\n" * (mode != 0o644) + text, mode)
    write(tmp_path, "good.py", KEEP)
    assert plugins.load(str(tmp_path)).ask("signal", Signal("killMaster")), "the others are of use"
    (error,) = said(caplog)
    assert error.startswith(f"plugin {bad} is left out: ") and reason in error
    assert not hasattr(builtins, "ran"), "others may write to it"


@pytest.mark.parametrize("answer", ["7", "['x']", "[None]"])
def test_an_answer_that_is_no_list_of_orders_is_as_good_as_none(tmp_path: Path, answer: str) -> None:
    write(tmp_path, "a.py", KEEP.replace('[ToController("save_and_exit")]', answer))
    assert plugins.load(str(tmp_path)).ask("signal", Signal("killMaster")) is None


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o2775])
def test_of_a_folder_that_others_may_write_to_nothing_is_run(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As a volume with an fsGroup is."""
    write(tmp_path, "a.py", KEEP)
    tmp_path.chmod(mode)
    assert plugins.load(str(tmp_path)).ask("signal", Signal("killMaster")) is None
    assert said(caplog) == [f"no plugins: plugin_dir {tmp_path}: {OWNER}"]


def test_a_compiled_copy_that_somebody_left_is_not_run(tmp_path: Path) -> None:
    file = write(tmp_path, "a.py", KEEP.replace("killMaster", "stopTrain"))
    cached = py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert cached and Path(cached).parent == tmp_path / "__pycache__"
    write(tmp_path, "a.py", KEEP)
    assert plugins.load(str(tmp_path)).ask("signal", Signal("killMaster"))


def test_a_plugin_may_have_what_asks_for_its_module(tmp_path: Path) -> None:
    text = "import dataclasses, pickle\n" + KEEP + "\n@dataclasses.dataclass\nclass Memory:\n    x: int = 0\n"
    write(tmp_path, "memory.py", text + "pickle.loads(pickle.dumps(Memory()))\n")
    assert plugins.load(str(tmp_path)).ask("signal", Signal("killMaster"))


def test_no_folder_and_a_link_are_no_plugins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nowhere, link = tmp_path / "nowhere", tmp_path / "link.py"
    assert plugins.load(str(nowhere)).ask("signal", Signal("killMaster")) is None
    link.symlink_to(write(tmp_path, "_real.py", KEEP))
    assert plugins.load(str(tmp_path)).ask("signal", Signal("killMaster")) is None
    assert said(caplog) == [
        f"no plugins: plugin_dir {nowhere}: no such folder", f"plugin {link} is left out: not a regular file",
    ]  # fmt: skip
