"""What a TaskD manager of many nodes costs: a real manager process, real proxies, agents and workers on TaskNet.

    python -m bench.taskd [--quick] [--nodes N ...] [--json FILE]

All members join and register; then ClusterD, played by this process, orders a link failover, which goes to every
worker, is confirmed by each, and is done when all have said so; then the agents only say that they are alive. In the
end this process takes the manager's place, the nodes come to it, and it sends messages to all workers at once, of which
each has to get one copy. The manager's own processor time is told beside the time on the clock, for on a small machine
the simulation of 10 000 workers needs far more of it than the manager. Growth is the exponent of a power law through
the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from bench.jobs import ROOT, Stuck, environment
from bench.report import Row, show
from bench.scale import growth, raise_descriptor_limit
from bench.taskd_nodes import BROADCAST, TO_MANAGER
from evertrain import aio
from evertrain.taskd.codes import ALL, WORKER
from evertrain.taskd.manager.clusterd import RECOVER
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.security import Security
from evertrain.wire import service
from evertrain.wire.recover_pb2 import ClientInfo, Status, SwitchRankList, SwitchResult

PER_NODE = 8
PROCESSES = 4
"""That the nodes are spread over: none may have more open files than is allowed."""
PATIENCE = 600.0
GROWTH_BUDGET = 1.2
MANAGER = """
import sys
from taskd.api import init_taskd_manager, start_taskd_manager
init_taskd_manager({"job_id": "bench", "node_nums": int(sys.argv[1]), "proc_per_node": int(sys.argv[2])})
start_taskd_manager()
"""


@dataclass
class Figures:
    nodes: int
    joined: float = 0.0
    join_cpu: float = 0.0
    memory: float = 0.0
    """MB of the manager with all members, and without any."""
    empty: float = 0.0
    ordered: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    order_cpu: list[float] = field(default_factory=list)
    alive_cpu: float = 0.0
    broadcast: list[float] = field(default_factory=list)
    broadcast_cpu: list[float] = field(default_factory=list)

    @property
    def workers(self) -> int:
        return self.nodes * PER_NODE


class ClusterD:
    """Orders link failovers and waits for the result."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[SwitchRankList] = asyncio.Queue()
        self.results: asyncio.Queue[tuple[float, bool]] = asyncio.Queue()

    async def SubscribeNotifySwitch(self, request: ClientInfo, context: Any) -> AsyncIterator[SwitchRankList]:
        while True:
            yield await self.orders.get()

    async def ReplySwitchNicResult(self, request: SwitchResult, context: Any) -> Status:
        self.results.put_nowait((time.monotonic(), request.result))
        return Status()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        # As the original allows: its clients may ask every 3 s whether it is there.
        server = grpc.aio.server(options=[("grpc.http2.min_ping_interval_without_data_ms", 3000)])
        server.add_generic_rpc_handlers((service.handlers(RECOVER, self),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield port
        finally:
            await server.stop(None)


class Crowd:
    """The processes with the simulated nodes, and what they tell."""

    def __init__(self) -> None:
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._told: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._news = asyncio.Condition()
        self._ended = False

    async def start(self, manager: str, nodes: int, env: dict[str, str]) -> None:
        edges = [nodes * part // PROCESSES for part in range(PROCESSES + 1)]
        for number, (first, last) in enumerate(zip(edges, edges[1:], strict=False)):
            command = (manager, f"127.0.2.{number + 1}", first, last, PER_NODE)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.taskd_nodes", *map(str, command),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=ROOT,
            )  # fmt: skip
            self._processes.append(process)
            self._readers.append(asyncio.create_task(self._read(process)))
        await self.all_have("ready")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout
        while line := await process.stdout.readline():
            told = json.loads(line)
            if told["kind"] == "refused":
                print(f"a message was not taken at once: {told}", file=sys.stderr)
            async with self._news:
                self._told.setdefault((told["kind"], told["number"]), []).append(told)
                self._news.notify_all()
        async with self._news:
            self._ended = True
            self._news.notify_all()

    def tell(self, command: str) -> None:
        for process in self._processes:
            assert process.stdin
            process.stdin.write(json.dumps(command).encode() + b"\n")

    async def all_have(self, kind: str, number: int = 0) -> float:
        """When the last of the processes told this."""
        return float(max(told["at"] for told in await self.all_tell(kind, number)))

    async def all_tell(self, kind: str, number: int = 0) -> list[dict[str, Any]]:
        try:
            async with aio.timeout(PATIENCE), self._news:
                await self._news.wait_for(lambda: self._ended or len(self._told.get((kind, number), ())) == PROCESSES)
        except TimeoutError:
            raise Stuck(f"not all nodes are {kind} ({number}) within {PATIENCE:g} s") from None
        if self._ended:
            raise Stuck("a process with nodes has ended, see above")
        return self._told[kind, number]

    async def close(self) -> None:
        for process in self._processes:
            process.kill()
            await process.wait()
        await asyncio.gather(*self._readers)


@contextlib.asynccontextmanager
async def manager(nodes: int, env: dict[str, str]) -> AsyncIterator[psutil.Process]:
    """Listening."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MANAGER, str(nodes), str(PER_NODE), stdout=subprocess.DEVNULL, env=env, cwd=ROOT
    )
    try:
        async with aio.timeout(60):
            while not await answers(int(env["TASKD_MANAGER_PORT"])):
                await asyncio.sleep(0.05)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


async def answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def used(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


async def measure(nodes: int, orders: int, idle: float) -> Figures:
    figures, clusterd, crowd, token = Figures(nodes), ClusterD(), Crowd(), secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        async with clusterd.listening() as clusterd_port:
            env = environment() | {
                "EVERTRAIN_TOKEN": token,
                "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
                "POD_IP": "127.0.0.1",
                "TASKD_MANAGER_PORT": str(port),
                "MINDX_SERVER_IP": "127.0.0.1",
                "MINDX_SERVER_PORT": str(clusterd_port),
                "TASKD_PROCESS_ENABLE": "off",  # what the MindIO controller costs is measured by bench.scale
                "TASKD_LOG_PATH": folder,
                "TASKD_LOG_STDOUT": "False",
            }
            try:
                async with manager(nodes, env) as process:
                    await crowd.start(f"127.0.0.1:{port}", nodes, env)
                    await fill(figures, process, crowd, clusterd, orders, idle)
                    crowd.tell("rest")
                    await crowd.all_have("resting")
                top = Node(TO_MANAGER, listen=f"127.0.0.1:{port}", security=Security(token))
                await top.start()
                try:
                    await spread(figures, top, crowd, orders)
                finally:
                    await top.close()
            finally:
                await crowd.close()
    return figures


async def fill(
    figures: Figures, process: psutil.Process, crowd: Crowd, clusterd: ClusterD, orders: int, idle: float
) -> None:
    figures.empty = process.memory_info().rss / 1e6
    before, began = used(process), time.monotonic()
    crowd.tell("join")
    figures.joined = await crowd.all_have("joined") - began
    figures.join_cpu = used(process) - before
    figures.memory = process.memory_info().rss / 1e6
    for number in range(1, orders + 1):
        await asyncio.sleep(0.5)  # let what is left of the last order pass
        before, began = used(process), time.monotonic()
        clusterd.orders.put_nowait(SwitchRankList(rankID=["0"], op=[True], jobId="bench"))
        figures.ordered.append(await crowd.all_have("ordered", number) - began)
        async with aio.timeout(PATIENCE):
            at, result = await clusterd.results.get()
        if not result:
            raise Stuck("a worker could not be told")
        figures.answered.append(at - began)
        await asyncio.sleep(0.5)
        figures.order_cpu.append(used(process) - before)
    crowd.tell("beat")
    await asyncio.sleep(3)
    before, began = used(process), time.monotonic()
    await asyncio.sleep(idle)
    figures.alive_cpu = 100 * (used(process) - before) / (time.monotonic() - began)


async def spread(figures: Figures, top: Node, crowd: Crowd, broadcasts: int) -> None:
    """The nodes find the new manager by themselves, and say again whom they lead to."""
    assert top.server is not None
    async with aio.timeout(PATIENCE):
        while len(top.server.members) < figures.nodes:
            await asyncio.sleep(0.05)
    for number in range(1, broadcasts + 1):
        await asyncio.sleep(0.5)
        before, began = time.process_time(), time.monotonic()
        if code := await top.send(Position(WORKER, ALL, ALL), str(number), mtype=BROADCAST):
            raise Stuck(f"a broadcast is refused: {code}")
        figures.broadcast.append(await crowd.all_have(BROADCAST, number) - began)
        figures.broadcast_cpu.append(time.process_time() - before)
    await asyncio.sleep(0.5)  # a second copy would come right behind the first
    crowd.tell("count")
    if (most := max(told["most"] for told in await crowd.all_tell("counted"))) != 1:
        raise Stuck(f"a worker got {most} copies of one broadcast")


def rows(measured: list[Figures]) -> list[Row]:
    result = []
    for figures in measured:
        n = f"{figures.nodes:,} nodes: ".replace(",", " ")
        per_worker = 1000 * (figures.memory - figures.empty) / figures.workers
        result += [
            Row(n + f"{figures.workers} workers and the agents join", [figures.joined]),
            Row(n + "  the manager's part of it", [figures.join_cpu], "s cpu"),
            Row(n + "  its memory", [figures.memory], "MB", notes=f"{per_worker:.1f} kB a worker"),
            Row(n + "an order is with all workers", figures.ordered),
            Row(n + "  confirmed and carried out by all", figures.answered),
            Row(n + "  the manager's part of it", figures.order_cpu, "s cpu"),
            Row(n + "agents say that they are alive", [figures.alive_cpu], "% cpu"),
            Row(n + "a broadcast is with all workers", figures.broadcast, notes="one copy each"),
            Row(n + "  the sender's part of it", figures.broadcast_cpu, "s cpu"),
        ]
    if len(measured) > 1:
        for name, values in (("joining", "join_cpu"), ("an order", "order_cpu")):
            points = []
            for figures in measured:
                value = getattr(figures, values)
                points.append((figures.nodes, statistics.median(value) if isinstance(value, list) else value))
            result.append(Row(f"growth, cpu of the manager, {name}", [growth(points)], "exponent", GROWTH_BUDGET))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.taskd", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 250 nodes, under a minute")
    parser.add_argument("--nodes", type=int, nargs="*", help="sizes (125 and 1250)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    sizes = sorted(options.nodes or ([50, 250] if options.quick else [125, 1250]))
    # An agent, a proxy's two ends and the workers of each node; four processes share them.
    raise_descriptor_limit(sizes[-1] // PROCESSES * 2 * (PER_NODE + 3) + 1000)
    orders, idle = (3, 5.0) if options.quick else (5, 30.0)
    measured = [aio.run(measure(size, orders, idle)) for size in sizes]
    return 0 if show("A TaskD manager of many nodes", rows(measured), options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
