"""`manager.py` as a process of its own: how it ends, and what a user's plugin changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.taskd.cluster import ScriptedClusterD

ROOT = Path(__file__).parents[3]
MANAGER = """\
import os
from evertrain.taskd.manager import bridge
from taskd.api import init_taskd_manager, start_taskd_manager
bridge.CLOSING = 0.5
assert init_taskd_manager({"job_id": "job-1", "node_nums": 1, "proc_per_node": 1, "plugin_dir": os.getenv("PLUGINS")})
print("it returned", start_taskd_manager(), flush=True)
"""
CONTROLLER = """\
import os, time

def _call(name, *args):
    with open(os.environ["CALLS"], "a") as file:
        print(name, *args, file=file)
    if os.environ["HANGS"] == name:
        while True:
            time.sleep(60)

def tft_register_mindx_callback(name, function): return 0
def tft_init_controller(*args): return _call("init", *args)
def tft_start_controller(*args): return _call("start", *args)
def tft_destroy_controller(): return _call("destroy")
def tft_notify_controller_dump(): return _call("dump")
def tft_notify_controller_stop_train(*args): return _call("stop", *args)
"""


class Process:
    """A manager with a controller of MindIO that writes down what is asked of it, and may never answer."""

    def __init__(self, folder: Path, hangs: str = "", clusterd: int = 0, plugins: str = "", **environment: str) -> None:
        self.calls = folder / "calls"
        self.calls.touch()
        package = folder / "mindio_ttp"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "controller_ttp.py").write_text(CONTROLLER)
        (folder / "manager.py").write_text(MANAGER)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        settings = {
            **os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'src'}", "POD_IP": "127.0.0.1", "WORLD_SIZE": "1",
            "TTP_PORT": "8000", "TASKD_MANAGER_PORT": str(self.port), "PROCESS_RECOVER": "on", "CALLS": str(self.calls),
            "HANGS": hangs, "PLUGINS": plugins, "TASKD_LOG_PATH": str(folder / "log"),
            "TASKD_MANAGER_RESTART": "off",
        }  # fmt: skip
        if clusterd:
            settings |= {"MINDX_SERVER_IP": "127.0.0.1", "MINDX_SERVER_PORT": str(clusterd)}
        self.process = subprocess.Popen(
            [sys.executable, "manager.py"], cwd=folder, env=settings | environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self._lines = self.process.stdout

    def wait_for(self, text: str) -> str:
        for line in self._lines:
            if text in line:
                return line
        raise AssertionError(f"it ended without saying {text!r}")

    def end(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        rest, _ = self.process.communicate(timeout=90)
        return rest


@contextlib.contextmanager
def ended(process: Process) -> Iterator[Process]:
    try:
        yield process
    finally:
        process.process.kill()
        process.process.communicate()


@pytest.mark.parametrize("hangs", ["", "start"])
def test_sigterm_ends_the_manager_whatever_the_controller_does(tmp_path: Path, hangs: str) -> None:
    with ended(Process(tmp_path, hangs)) as manager:
        manager.wait_for("manager init success" if hangs == "start" else "the manager decides by itself")
        assert "it returned True" in manager.end()
        assert manager.process.returncode == 0
    assert "destroy" not in manager.calls.read_text(), "its pod may be replaced: processes look for its successor"


async def test_the_plugin_of_the_documentation_does_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "taskd.md").read_text()
    (example,) = [each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "(Plugin)" in each]
    folder = tmp_path / "plugins"
    folder.mkdir(mode=0o700)
    (folder / "save.py").write_text(example)
    (folder / "save.py").chmod(0o600)
    clusterd = ScriptedClusterD()
    await clusterd.start()
    try:
        with ended(Process(tmp_path, clusterd=clusterd.port, plugins=str(folder))) as manager:
            await clusterd.expect("Init")
            await clusterd.subscribed.wait()
            clusterd.say("killMaster")
            clusterd.say("stopTrain", "stop_train", faults={0: 1})
            # The log tells, in another thread than this loop's, which ClusterD needs.
            await asyncio.to_thread(manager.wait_for, "do action stop_train finish")
            assert "it returned True" in await asyncio.to_thread(manager.end)
    finally:
        await clusterd.stop()
    calls = manager.calls.read_text().splitlines()
    assert calls[2:] == ["dump", "stop {0: 1} stop"], "instead of ending the controller first"
