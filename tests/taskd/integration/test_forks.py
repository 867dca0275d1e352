"""A process that talks to its manager, and forks: msrun starts its processes so, and a training its data loaders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = """
import contextlib, os, socket, subprocess, sys
from evertrain.taskd.member import Member
from evertrain.taskd.net.background import shared
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.proxy import Proxy

assert "GRPC_ENABLE_FORK_SUPPORT" not in os.environ
manager = Node(Position("Mgr", "0"), listen="127.0.0.1:0")
shared().run(manager.start())
with contextlib.closing(socket.socket()) as free:
    free.bind(("127.0.0.1", 0))
    listen = "127.0.0.1:%d" % free.getsockname()[1]
Proxy("0", listen, f"127.0.0.1:{manager.port}").start()
agent = Member(Position("Agent", "0"), listen)
agent.start()
assert agent.wait_joined(90)

def forked():
    child = os.fork()
    if not child:
        os._exit(0)  # as multiprocessing does
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def started():
    return subprocess.Popen(["/bin/true"], preexec_fn=os.setsid).wait()

ends = []
for _ in range(20):
    assert agent.send("STATUS", 201, "1")
    ends.append({"forked": forked, "started": started}[sys.argv[1]]())
print({end: ends.count(end) for end in ends})
assert agent.send("STATUS", 201, "1")
"""


def test_who_was_first_is_told(tmp_path: Path) -> None:
    for first, told in (("grpc", 1), ("os", 0)):
        code = f"import {first}; import evertrain.taskd.net, os; assert 'GRPC_ENABLE_FORK_SUPPORT' not in os.environ"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
        assert done.stderr.count("GRPC_ENABLE_FORK_SUPPORT=0 prevents it") == told


@pytest.mark.parametrize("way", ["started", "forked"])
def test_children_live(way: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, way], capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout.strip()) == (0, "{0: 20}"), done.stderr[-2000:]
