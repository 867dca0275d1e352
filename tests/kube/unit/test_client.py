"""The client against a server that says what the test wants: what each answer means to the caller."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from evertrain import aio
from evertrain.kube import client as client_module
from evertrain.kube.client import Client
from evertrain.kube.port import POD, ApiError, Conflict, Gone, NotFound, Object


class Script:
    """Answers each request with the next of its lines: (code, body)."""

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head.split()[1])
        code, body = self._answers.pop(0)
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (code, len(body), body))
        await writer.drain()
        writer.close()


def kubeconfig(folder: Path, server: str) -> Path:
    config = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))
    return folder / "kubeconfig"


def told(folder: Path, script: Script, test: Callable[[Client], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        server = await asyncio.start_server(script.answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client.from_kubeconfig(kubeconfig(folder, f"http://127.0.0.1:{port}"))
        async with server:
            try:
                return await test(client)
            finally:
                await client.close()

    return aio.run(run())


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def status(code: int, reason: str, message: str) -> Object:
    return {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}


async def watched(client: Client) -> list[tuple[str, str]]:
    return [
        (change.type, change.object["metadata"]["name"])
        async for change in client.watch(POD, "default", resource_version="7")
    ]


def test_a_list_whose_pages_have_expired_is_asked_for_as_a_whole(tmp_path: Path) -> None:
    item = {"metadata": {"name": "a"}}
    script = Script(
        (200, body(items=[item], metadata={"resourceVersion": "5", "continue": "more"})),
        (410, body(**status(410, "Expired", "the continue parameter is too old"))),
        (200, body(items=[item, {"metadata": {"name": "b"}}], metadata={"resourceVersion": "9"})),
    )
    listing = told(tmp_path, script, lambda client: client.list(POD, "default"))
    assert [each["metadata"]["name"] for each in listing.items] == ["a", "b"]
    assert listing.resource_version == "9"
    assert "limit=" in script.asked[0] and "continue=more" in script.asked[1]
    assert "limit=" not in script.asked[2] and "continue" not in script.asked[2]


@pytest.mark.parametrize(("code", "kind"), [(410, Gone), (500, ApiError)])
def test_an_error_within_a_watch(tmp_path: Path, code: int, kind: type[ApiError]) -> None:
    events = [
        {"type": "ADDED", "object": {"metadata": {"name": "a"}}},
        {"type": "ERROR", "object": status(code, "Expired", "too old")},
    ]
    script = Script((200, b"\n".join(json.dumps(event).encode() for event in events) + b"\n"))
    with pytest.raises(kind, match="too old") as refused:
        told(tmp_path, script, watched)
    assert type(refused.value) is kind and refused.value.code == code


@pytest.mark.parametrize("line", [b"<html>", b"[]", b'{"type":"ADDED"}', b'{"type":"ADDED","obj'])
def test_a_watch_that_makes_no_sense(tmp_path: Path, line: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        told(tmp_path, Script((200, line + b"\n")), watched)
    assert refused.value.code == 502


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ((404, body(**status(404, "NotFound", 'pods "a" not found'))), NotFound, 'pods "a" not found'),
        ((409, body(**status(409, "Conflict", "was changed"))), Conflict, "was changed"),
        ((503, b"upstream is away"), ApiError, "upstream is away"),
        ((500, b""), ApiError, "X"),
        ((200, b"<html>"), ApiError, "not JSON"),
    ],
    ids=["missing", "conflict", "proxy", "nothing", "page"],
)
def test_refusals(tmp_path: Path, answer: tuple[int, bytes], kind: type[ApiError], message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        told(tmp_path, Script(answer), lambda client: client.get(POD, "a", "default"))
    assert type(refused.value) is kind


def connections_to(port: int) -> Iterator[socket.socket]:
    """Of this process."""
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or connected with nobody
            if not file.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as copy:
                if copy.family == socket.AF_INET and copy.getpeername()[1] == port:
                    yield copy


@pytest.mark.parametrize("proxy", [False, True], ids=["direct", "proxy"])
def test_a_server_that_vanishes_is_missed_soon(tmp_path: Path, proxy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word, as a machine does that loses its power: only the kernel can notice, by asking."""

    async def run() -> list[tuple[int, int, int]]:
        requests: list[str] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = (await reader.readuntil(b"\r\n\r\n")).decode().split()[1]
            requests.append(asked)
            event = b'{"type":"ADDED","object":{"metadata":{"name":"a"}}}\n'
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(event), event))
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        host = f"127.0.0.1:{port}"
        if proxy:
            monkeypatch.setenv("http_proxy", f"http://{host}")
            for name in ("no_proxy", "NO_PROXY"):
                monkeypatch.delenv(name, raising=False)
            host = "kubernetes.invalid:6443"
        client = Client.from_kubeconfig(kubeconfig(tmp_path, f"http://{host}"))
        async with server:
            watching = client.watch(POD, "default", resource_version="7")
            assert (await asyncio.wait_for(anext(watching), 30)).type == "ADDED"
            assert requests[0].startswith(f"http://{host}/api" if proxy else "/api")
            bounds = [
                (
                    each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                    each.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
                    + each.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
                    * each.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
                    each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
                )
                for each in connections_to(port)
            ]
            assert isinstance(watching, AsyncGenerator)
            await watching.aclose()
            await client.close()
        return bounds

    [(asks, seconds, unanswered)] = aio.run(run())
    assert asks and seconds < 40 and 0 < unanswered < 40_000


def test_a_server_that_is_gone_before_a_watch_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ANSWER_TIMEOUT", 0.1)

    async def run() -> None:
        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        client = Client.from_kubeconfig(kubeconfig(tmp_path, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        async with server, aio.timeout(60):
            with pytest.raises(TimeoutError, match="has not begun"):
                await watched(client)
            await client.close()

    aio.run(run())
