from __future__ import annotations

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
def test_what_is_no_plugin_is_said_so(tmp_path: Path, text: str, mode: int, reason: str) -> None:
    write(tmp_path, "bad.py", text, mode)
    with pytest.raises(ValueError, match=reason):
        plugins.load(str(tmp_path))


@pytest.mark.parametrize("answer", ["7", "['x']", "[None]"])
def test_an_answer_that_is_no_list_of_orders_is_as_good_as_none(tmp_path: Path, answer: str) -> None:
    write(tmp_path, "a.py", KEEP.replace('[ToController("save_and_exit")]', answer))
    assert plugins.load(str(tmp_path)).ask("signal", Signal("killMaster")) is None


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.py", KEEP)
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="nobody else may write"):
        plugins.load(str(tmp_path))


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


def test_no_folder_and_a_link_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        plugins.load(str(tmp_path / "nowhere"))
    (tmp_path / "link.py").symlink_to(write(tmp_path, "_real.py", KEEP))
    with pytest.raises(ValueError, match="not a regular file"):
        plugins.load(str(tmp_path))
