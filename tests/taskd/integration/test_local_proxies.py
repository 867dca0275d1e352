"""`LOCAL_PROXY_ENABLE`: beside every container a proxy encrypts what leaves it. Relays take their places here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from evertrain.taskd import frames
from evertrain.taskd.frames import Body
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from tests.ports import free_ports
from tests.taskd.cluster import ScriptedClusterD
from tests.taskd.integration.test_manager_process import Process, ended
from tests.taskd.relay import Relay

ELSEWHERE = "240.0.0.1"
"""Where nobody is, and nobody can be."""
SETTINGS = {"LOCAL_PROXY_ENABLE": "on", "POD_IP": ELSEWHERE, "MINDX_SERVER_IP": ELSEWHERE}
NODE = f"""
import sys
from evertrain.taskd.worker import operations
from taskd.api import destroy_taskd_proxy, destroy_taskd_worker, init_taskd_proxy, init_taskd_worker, start_taskd_worker

operations.register_nic_switch(lambda ranks, ops: True)
assert init_taskd_proxy({{"UpstreamAddr": "{ELSEWHERE}", "ServerRank": "0"}})
assert init_taskd_worker(0) and start_taskd_worker()
sys.stdin.read()
assert destroy_taskd_worker() and destroy_taskd_proxy()
"""


@contextlib.asynccontextmanager
async def relay(target: int) -> AsyncIterator[int]:
    made = Relay(target)
    await made.start()
    try:
        yield made.port
    finally:
        await made.stop()


@contextlib.asynccontextmanager
async def node(folder: Path, manager: int, proxy: int) -> AsyncIterator[None]:
    """A process with the proxy of a node and a worker, which the manager knows."""
    environment = {
        **os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(sys.path), "RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "TASKD_MANAGER_PORT": str(manager), "TASKD_PROXY_PORT": str(proxy), "TASKD_LOG_PATH": str(folder / "log"),
        "TASKD_DATATRACE_DIR": str(folder), "TASKD_PROFILING_DIR": str(folder),
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, env=environment, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        while b"worker 0 register manager success" not in await asyncio.wait_for(process.stdout.readline(), 90):
            assert not process.stdout.at_eof()
        yield
        await asyncio.wait_for(process.communicate(b""), 90)
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_manager_node_and_clusterd_find_each_other_over_the_proxies_beside_them(tmp_path: Path) -> None:
    """All are named by an address where nobody is. From the node to the manager there are two relays, that of the
    node's pod and that of the manager's; from the manager to ClusterD one."""
    (port,) = free_ports(1)
    clusterd = ScriptedClusterD()
    await clusterd.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(clusterd.stop)
        to_clusterd = await stack.enter_async_context(relay(clusterd.port))
        manager = stack.enter_context(ended(Process(tmp_path, clusterd=to_clusterd, **SETTINGS)))
        for method in ("Init", "Register"):
            await clusterd.expect(method)
        await asyncio.wait_for(clusterd.subscribed.wait(), 90)
        beside_manager = await stack.enter_async_context(relay(manager.port))
        beside_node = await stack.enter_async_context(relay(beside_manager))
        await stack.enter_async_context(node(tmp_path, beside_node, port))

        clusterd.switch(["0"], [True])
        reply = await clusterd.expect("ReplySwitchNicResult")
        assert reply.result, "from ClusterD to the worker and back"

        agent = Node(Position("Agent", "0"), upstream=f"127.0.0.1:{port}")
        stack.push_async_callback(agent.close)
        await agent.start()
        assert await agent.wait_joined(90)
        for body in (frames.body("REGISTER", 0, "", {}), frames.body("STATUS", 201, "5", {})):
            assert await agent.send(Position("Mgr", "0"), body.encode(), mtype="DEFAULT") == 0
        assert (await hear(agent)).code == 210
        clusterd.say("faultNodesExit", "fault_nodes_exit", nodeRankIds=["0"])
        assert (await hear(agent)).code == 203


async def hear(agent: Node) -> Body:
    return frames.decode((await asyncio.wait_for(agent.received.get(), 90)).body)
