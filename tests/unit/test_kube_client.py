"""The client against a server that says what the test wants: what each answer means to the caller."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def told(folder: Path, script: Script, test: Callable[[Client], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        server = await asyncio.start_server(script.answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        config = {
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))
        client = Client.from_kubeconfig(folder / "kubeconfig")
        async with server:
            try:
                return await test(client)
            finally:
                await client.close()

    return asyncio.run(run())


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
