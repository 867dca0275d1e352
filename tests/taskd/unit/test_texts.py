"""Lines of the log that operators of MindCluster look for."""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.taskd import log
from evertrain.taskd.manager.orders import NicReply, StressReply
from evertrain.taskd.manager.shell import Config, Manager
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    log.stop()  # tests before may have opened files
    caplog.set_level("INFO", logger="evertrain.taskd")


async def test_the_network_is_there(caplog: pytest.LogCaptureFixture) -> None:
    node = Node(Position("Proxy", "3", "1794825081"), listen="127.0.0.1:0")
    await node.start()
    await node.close()
    assert "init network success, role=Proxy, srvRank=3, processRank=1794825081" in caplog.messages


async def test_what_workers_were_ordered_is_done(caplog: pytest.LogCaptureFixture) -> None:
    manager: Any = Manager(Config("job-1", 1, 1))
    results = {"0": {"0": ("0", "OK")}}
    manager._carry_out([NicReply("job-1", True), NicReply("job-1", False), StressReply("job-1", results)])
    assert caplog.messages == [
        "all rank switch success",
        "link failover failed",
        f"all stress test finish: {results}",
    ]
