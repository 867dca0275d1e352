"""The operator over HTTP against the embedded API server: connections cut, operators killed, and nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from evertrain import aio
from evertrain.kube import client as client_module
from evertrain.kube.cache import Cache
from evertrain.kube.port import (
    ASCEND_JOB,
    CONFIG_MAP,
    LEASE,
    POD,
    POD_GROUP,
    AlreadyExists,
    ApiError,
    Conflict,
    NotFound,
    Object,
)
from evertrain.operator.shell import Operator
from tests.operator.acjobs import ascend_job
from tests.operator.cluster import Cluster, background, cluster, until


class Scissors:
    """A way to the server on which every connection is cut, and cut again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()
        self.cuts = 0

    async def __aenter__(self) -> Scissors:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.sleep(0.05)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, inner_writer}

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    target.write(data)
                    await target.drain()
            target.transport.abort()

        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))
        self._open -= {writer, inner_writer}

    def cut(self) -> None:
        self.cuts += len(self._open)
        for writer in self._open:
            writer.transport.abort()

    async def every(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            self.cut()


def test_the_client_says_what_the_server_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as running:
            kube = running.client()
            try:
                made = await kube.create(CONFIG_MAP, config_map("a", {"k": "1"}))
                assert (made["kind"], made["data"]) == ("ConfigMap", {"k": "1"})
                with pytest.raises(AlreadyExists):
                    await kube.create(CONFIG_MAP, config_map("a", {}))
                with pytest.raises(NotFound, match='configmaps "b" not found'):
                    await kube.get(CONFIG_MAP, "b", "default")
                newer = await kube.patch(CONFIG_MAP, "a", "default", {"data": {"k": "2", "l": "3"}})
                with pytest.raises(Conflict):
                    await kube.replace(CONFIG_MAP, made)
                assert (await kube.replace(CONFIG_MAP, newer | {"data": {"m": "4"}}))["data"] == {"m": "4"}
                with pytest.raises(Conflict):
                    await kube.delete(CONFIG_MAP, "a", "default", uid="another")
                applied = await kube.apply(CONFIG_MAP, config_map("c", {"k": "1"}), manager="me")
                assert applied["data"] == {"k": "1"}
                with pytest.raises(ApiError) as refused:
                    await kube.create(CONFIG_MAP, config_map("Not A Name", {}))
                assert (refused.value.code, refused.value.reason) == (422, "Invalid")
                monkeypatch.setattr(client_module, "PAGE", 3)
                for number in range(10):
                    await kube.create(CONFIG_MAP, config_map(f"page-{number}", {}))
                listing = await kube.list(CONFIG_MAP, "default")
                assert len([item for item in listing.items if item["metadata"]["name"].startswith("page-")]) == 10
                assert {item["kind"] for item in listing.items} == {"ConfigMap"}
                await kube.delete(CONFIG_MAP, "c", "default")
                changes = kube.watch(CONFIG_MAP, resource_version=listing.resource_version)
                change = await asyncio.wait_for(anext(changes), 5)
                assert (change.type, change.object["metadata"]["name"]) == ("DELETED", "c")
                await changes.aclose()
            finally:
                await kube.close()
            with pytest.raises(OSError):
                nobody = running.client(1)
                try:
                    await nobody.get(CONFIG_MAP, "a", "default")
                finally:
                    await nobody.close()

    aio.run(test())


def config_map(name: str, data: dict[str, str]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "default"},
        "data": data,
    }


def test_no_update_is_lost_with_the_watch_cut_every_100_ms(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as running, Scissors(running.server.port) as scissors:
            kube = running.client(scissors.port)
            cache = Cache(kube, CONFIG_MAP, "default")
            seen: dict[str, int] = {}

            def listener(before: Object | None, after: Object | None) -> None:
                item = after or before or {}
                seen[item["metadata"]["name"]] = int(item["data"]["n"]) if after is not None else -1

            cache.listen(listener)
            async with background(cache.run, lambda: scissors.every(0.1)):
                last: dict[str, int] = {}
                for number in range(300):
                    name = f"c{number % 20}"
                    if last.get(name, -1) == -1:
                        await running.kube.create(CONFIG_MAP, config_map(name, {"n": str(number)}))
                        last[name] = number
                    elif number % 7 == 0:
                        await running.kube.delete(CONFIG_MAP, name, "default")
                        last[name] = -1
                    else:
                        await running.kube.patch(CONFIG_MAP, name, "default", {"data": {"n": str(number)}})
                        last[name] = number
                    await asyncio.sleep(0.005)
                assert await cache.until(lambda: seen == last, 10), (seen, last)
            await kube.close()
            assert scissors.cuts > 10

    aio.run(test())


def test_jobs_succeed_with_every_watch_of_the_operator_cut_every_100_ms(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as running:
            kube = running.client()
            operator = Operator(kube, rank_tables=tmp_path / "ranktables")

            async def end_watches() -> None:
                while True:
                    await asyncio.sleep(0.1)
                    running.api.close()

            async with background(operator.run, running.nodes, end_watches):
                for number in range(10):
                    await running.kube.create(ASCEND_JOB, ascend_job(f"job-{number}", workers=3))

                async def succeeded() -> bool:
                    return await running.states() == ["Succeeded"] * 10

                await until(succeeded)
                assert len((await running.kube.list(POD)).items) == 40
            await kube.close()

    aio.run(test())


@contextlib.asynccontextmanager
async def operator_process(running: Cluster, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    running.client()
    command = [sys.executable, "-m", "evertrain.operator", "--kubeconfig"]
    command += [str(running.folder / f"kubeconfig-{running.server.port}"), "--ranktable-dir", str(running.folder / "t")]
    process = await asyncio.create_subprocess_exec(
        *command, *options, env=dict(os.environ), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_the_operator_is_killed_while_it_makes_pods_and_the_next_one_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as running, background(running.nodes):
            for number in range(5):
                await running.kube.create(ASCEND_JOB, ascend_job(f"job-{number}", workers=7))

            async def some_pods() -> bool:
                return len((await running.kube.list(POD)).items) >= 3

            async def succeeded() -> bool:
                return await running.states() == ["Succeeded"] * 5

            async with operator_process(running) as process:
                await until(some_pods)
                process.send_signal(signal.SIGKILL)
                await process.wait()
            pods = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in (await running.kube.list(POD)).items}
            async with operator_process(running) as process:
                await until(succeeded)
                process.terminate()
                assert await asyncio.wait_for(process.wait(), 10) == 0
            after = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in (await running.kube.list(POD)).items}
            assert len(after) == 40
            assert pods.items() <= after.items(), "no pod was made twice"

    aio.run(test())


def test_deleting_a_job_deletes_what_it_owns(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as running:
            operator = Operator(running.kube, rank_tables=tmp_path / "ranktables")
            async with background(operator.run, running.nodes):
                await running.kube.create(ASCEND_JOB, ascend_job("job", workers=2))

                async def succeeded() -> bool:
                    return await running.states() == ["Succeeded"]

                await until(succeeded)
                await running.kube.delete(ASCEND_JOB, "job", "default")

                async def gone() -> bool:
                    return not (await running.kube.list(POD)).items and not (await running.kube.list(POD_GROUP)).items

                await until(gone)

    aio.run(test())


async def status_line(port: int) -> str:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return ""
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    line = (await reader.readline()).decode().strip()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return line


def test_who_stands_by_is_healthy_and_does_nothing(tmp_path: Path) -> None:
    """A liveness probe would end it otherwise."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def test() -> None:
        async with cluster(tmp_path) as running:
            spec = {"holderIdentity": "another", "leaseDurationSeconds": 3600}
            lease = {"metadata": {"name": "ascend-operator", "namespace": "mindx-dl"}, "spec": spec}
            await running.kube.create(LEASE, lease)
            await running.kube.create(ASCEND_JOB, ascend_job("job"))

            async def healthy() -> bool:
                return await status_line(port) == "HTTP/1.1 200 OK"

            options = ("--leader-elect", "--enable-healthz", f"-healthz-address={port}")
            async with operator_process(running, *options):
                await until(healthy)
            assert await running.states() == [""]
            assert (await running.kube.get(LEASE, "ascend-operator", "mindx-dl"))["spec"] == spec

    aio.run(test())


def test_the_operator_as_a_process_leads_is_healthy_and_leaves_in_order(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def test() -> None:
        async with cluster(tmp_path) as running:

            async def healthy() -> bool:
                return await status_line(port) == "HTTP/1.1 200 OK"

            async def held() -> bool:
                leases = (await running.kube.list(LEASE, "mindx-dl")).items
                return any(lease["spec"].get("holderIdentity") for lease in leases)

            options = ("--leader-elect", "--enable-healthz", f"-healthz-address={port}")
            async with operator_process(running, *options) as process:
                await until(held)
                await until(healthy)
                process.terminate()
                assert await asyncio.wait_for(process.wait(), 10) == 0
            spec = (await running.kube.get(LEASE, "ascend-operator", "mindx-dl"))["spec"]
            assert spec["holderIdentity"] == ""

    aio.run(test())
