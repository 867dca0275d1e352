"""The API server on its socket: clients that don't read or don't write, a disk that takes no more."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from evertrain import aio

pytest.importorskip("starlette")

from evertrain.embedded.api import http, server  # noqa: E402
from evertrain.embedded.api.bootstrap import bootstrap  # noqa: E402
from evertrain.embedded.api.core import Api  # noqa: E402
from evertrain.embedded.api.http import Stream  # noqa: E402
from evertrain.embedded.certificates import credentials, write_kubeconfig  # noqa: E402
from evertrain.embedded.schema import Registry  # noqa: E402
from evertrain.embedded.store import Store  # noqa: E402
from evertrain.kube.client import Client as KubeClient  # noqa: E402
from evertrain.kube.port import CONFIG_MAP  # noqa: E402
from tests.embedded.api import EmbeddedApi, Running  # noqa: E402
from tests.kube_http import Client  # noqa: E402

MAPS = "/api/v1/namespaces/default/configmaps"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with EmbeddedApi(tmp_path, controllers=False) as found:
        yield found


@pytest.fixture
def client(running: Running) -> Iterator[Client]:
    made = Client(running.url, running.credentials.token, str(running.credentials.authority))
    yield made
    made.close()


@contextmanager
def connected(running: Running) -> Iterator[ssl.SSLSocket]:
    """With a small buffer, which is soon full."""
    host, _, port = running.url.removeprefix("https://").partition(":")
    tls = ssl.create_default_context(cafile=str(running.credentials.authority))
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.settimeout(20)
    plain.connect((host, int(port)))
    with tls.wrap_socket(plain, server_hostname=host) as made:
        yield made


def until(running: Running, holds: Callable[[], bool]) -> None:
    async def wait() -> None:
        async with aio.timeout(20):
            while not holds():
                await asyncio.sleep(0.01)

    running.call(wait())


def test_a_watcher_that_stops_reading_is_left_in_time(
    running: Running, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_LATE_SECONDS", 0.1)
    client.post(MAPS, {"metadata": {"name": "big"}}).expect(201)
    with connected(running) as watcher:
        head = f"Host: x\r\nAuthorization: Bearer {running.credentials.token}\r\n\r\n"
        watcher.sendall(f"GET {MAPS}?watch=true&resourceVersion=0&timeoutSeconds=1 HTTP/1.1\r\n{head}".encode())
        assert watcher.recv(100).startswith(b"HTTP/1.1 200")
        for number in range(30):
            client.patch(f"{MAPS}/big", {"data": {"text": str(number) * 400_000}}).expect(200)
        until(running, lambda: not running.api._watches)


def test_a_stream_that_was_never_begun_ends_too() -> None:
    ended: list[bool] = []

    async def lines() -> Any:
        yield b"never"

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    stream = Stream(lines(), "text/plain", on_end=lambda: ended.append(True))
    aio.run(asyncio.wait_for(stream({"type": "http"}, receive, send), 10))
    assert ended == [True]


def ask(connection: ssl.SSLSocket) -> None:
    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = b""
    while not answer.endswith(b"\r\n\r\nok"):
        piece = connection.recv(10_000)
        assert piece, "the server has left"
        answer += piece


@pytest.mark.parametrize(
    ("before", "sent"),
    [(0, b""), (0, b"GET /api HTTP/1.1\r\nHost: x\r\nX-Slow: "), (1, b"G")],
    ids=["nothing", "half", "half of the second"],
)
def test_a_client_that_does_not_finish_its_request_is_left(
    running: Running, monkeypatch: pytest.MonkeyPatch, before: int, sent: bytes
) -> None:
    if not before:
        monkeypatch.setattr(server, "_HEAD_SECONDS", 0.2)
    with connected(running) as slow:
        for _ in range(before):
            ask(slow)
        monkeypatch.setattr(server, "_HEAD_SECONDS", 0.2)
        slow.sendall(sent)
        try:
            left = not slow.recv(10_000)
        except (ConnectionError, ssl.SSLError):
            left = True
        assert left


def test_one_that_takes_its_time_between_requests_stays(
    running: Running, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(running) as patient:
        ask(patient)
        monkeypatch.setattr(server, "_HEAD_SECONDS", 0.1)
        running.call(asyncio.sleep(0.3))
        ask(patient)


@contextmanager
def full_disk(file: Path) -> Iterator[None]:
    """No file of this process may grow beyond the size that this one has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_and_forgotten_when_there_is_room(tmp_path: Path, running: Running, client: Client) -> None:
    client.post(MAPS, {"metadata": {"name": "before"}}).expect(201)
    with client.watch(MAPS, resourceVersion="0") as events:
        assert next(events)["object"]["metadata"]["name"] == "before"
        with full_disk(tmp_path / "state.db-wal"):
            status = client.post(MAPS, {"metadata": {"name": "lost"}}).expect(500, "InternalError")
            assert "the change can't be stored: " in status["message"]
            assert [item["metadata"]["name"] for item in client.get(MAPS).expect(200)["items"]] == ["before"]
        client.get(f"{MAPS}/lost").expect(404)
        client.post(MAPS, {"metadata": {"name": "after"}}).expect(201)
        assert next(events)["object"]["metadata"]["name"] == "after"


def test_a_body_that_does_not_come_is_not_waited_for(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_BODY_SECONDS", 0.2)
    with connected(running) as slow:
        head = f"Host: x\r\nAuthorization: Bearer {running.credentials.token}\r\nContent-Length: 100\r\n\r\n"
        slow.sendall(f"POST {MAPS} HTTP/1.1\r\n{head}".encode() + b'{"metadata":')
        assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_watches_end_in_order_when_the_server_stops(tmp_path: Path) -> None:
    async def scenario() -> None:
        api = Api(Store(), Registry.builtin())
        bootstrap(api)
        keys = credentials(tmp_path / "keys")
        running = server.ApiServer(api, keys)
        await running.start()
        write_kubeconfig(tmp_path / "kubeconfig", running.url, keys)
        client = KubeClient.from_kubeconfig(tmp_path / "kubeconfig")
        made = await client.create(CONFIG_MAP, {"metadata": {"name": "a", "namespace": "default"}})
        seen: list[str] = []

        async def follow() -> None:
            async for change in client.watch(CONFIG_MAP, "default", resource_version="0"):
                seen.append(change.object["metadata"]["name"])
                began.set()

        began = asyncio.Event()
        following = asyncio.create_task(follow())
        await began.wait()
        await running.stop()
        await following  # a watch that was cut fails
        assert seen == [made["metadata"]["name"]]
        await client.close()

    aio.run(asyncio.wait_for(scenario(), 30))
