"""Links with TLS: a job runs over them, and nobody else gets in or disturbs it."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from evertrain import aio
from evertrain.mindio import protocol as p
from evertrain.mindio import tls
from evertrain.mindio.asynclink import AsyncLink, LinkError
from evertrain.mindio.controller.machine import Machine
from evertrain.mindio.controller.server import Server
from evertrain.mindio.processor import Processor, Refused
from evertrain.mindio.timing import Timing
from evertrain.mindio.tls_dates import DateWatch
from tests.certificates import DAY, Authority, Issued
from tests.launch.launching import TRAINER, launch
from tests.mindio.strangers import strangers

TOKEN = "the-secret-of-this-job"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def node(authority: Authority) -> Issued:
    return authority.issue()


def hello(token: str) -> p.Hello:
    return p.Hello(version=p.VERSION, token=token, role="agent", ranks=[0, 1], world_size=2)


class Job:
    """A controller with an agent and two ranks that are training."""

    def __init__(self, server: Server, ranks: list[Processor], heard: list[p.Message]) -> None:
        self.server, self.ranks, self.heard = server, ranks, heard

    async def undisturbed(self, count: int) -> bool:
        """Every rank still has its link, and nobody was told anything since training began."""
        replies = [await asyncio.to_thread(rank.store_add, "prelude/n", 1) for rank in self.ranks]
        silent = all(rank._inbox.empty() for rank in self.ranks)
        return replies == [2 * count - 1, 2 * count] and silent and self.server.machine.ended is None


@asynccontextmanager
async def job(context: ssl.SSLContext | None, client: ssl.SSLContext | None) -> AsyncIterator[Job]:
    server = Server(Machine(2, Timing.derive(0.5)), TOKEN, tls=context)
    await server.start()
    heard: list[p.Message] = []
    agent, _ = await AsyncLink.open(server.address, hello(TOKEN), heard.append, lambda reason: None, tls=client)
    agent.listen()
    ranks = [Processor(server.address, TOKEN, rank=rank, tls=client) for rank in range(2)]
    try:
        for rank in ranks:
            await asyncio.to_thread(rank.connect)
            rank.send(p.Out(step=0, clean=True, fresh=True))
        for expected, answer in (
            (p.Join, p.Joined(generation=1, digests={p.STATE: "same"})),
            (p.Repair, p.Repaired(generation=1, ok=True, step=0)),
            (p.Go, p.Resumed(generation=1, step=1)),
        ):
            for rank in ranks:
                assert isinstance(await asyncio.to_thread(rank.receive, 10), expected)
            for rank in ranks:
                rank.send(answer)
        yield Job(server, ranks, heard)
    finally:
        for rank in ranks:
            rank.close()
        agent.close()
        await server.close()


def connect(address: tuple[str, int], token: str, context: ssl.SSLContext | None) -> str:
    """Try to become a rank; returns the reason why not."""
    processor = Processor(address, token, rank=1, tls=context)
    try:
        with pytest.raises(Refused) as refused:
            processor.connect(timeout=10)
        return str(refused.value)
    finally:
        processor.close()


def test_strangers_are_refused_in_words_on_both_sides_and_the_job_does_not_notice(
    authority: Authority, node: Issued, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with aio.timeout(40), job(tls.server_context(node.info), tls.client_context(node.info)) as running:
            address = running.server.address
            for count, stranger in enumerate(strangers(authority, node, tmp_path), 1):
                caplog.clear()
                heard = await asyncio.to_thread(connect, address, stranger.token, stranger.context)
                assert stranger.hears in heard, stranger.name
                assert stranger.logged in caplog.text, stranger.name
                assert stranger.token not in caplog.text
                assert await running.undisturbed(count), stranger.name
                with pytest.raises(LinkError) as refused:
                    await AsyncLink.open(address, hello(stranger.token), print, print, tls=stranger.context)
                assert stranger.hears in str(refused.value), stranger.name
            assert len(running.server.links) <= 3 + 1

    with caplog.at_level(logging.DEBUG):
        aio.run(scenario())


def test_tls_to_a_controller_without_certificates(node: Issued, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with aio.timeout(20), job(None, None) as running:
            heard = await asyncio.to_thread(connect, running.server.address, TOKEN, tls.client_context(node.info))
            assert heard == "TLS: the peer does not speak TLS"
            assert "it speaks TLS, and this controller plain text" in caplog.text
            assert await running.undisturbed(1)

    aio.run(scenario())


def test_garbage_inside_tls_and_a_cut_in_the_handshake(node: Issued, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        client = tls.client_context(node.info)
        async with aio.timeout(20), job(tls.server_context(node.info), client) as running:
            address = running.server.address
            reader, writer = await asyncio.open_connection(*address, ssl=client)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await reader.read() == b""
            writer.close()
            _, writer = await asyncio.open_connection(*address)
            writer.write(b"\x16\x03\x01")
            writer.close()
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"\x16\x03\x01\x00\x05hello")
            assert b"\x15\x03" in await reader.read(), "an alert comes back"
            writer.close()
            assert await running.undisturbed(1)

    aio.run(scenario())
    assert "a frame of" in caplog.text


def test_beyond_this_machine_takes_tls_or_a_clear_wish(node: Issued) -> None:
    machine = Machine(1, Timing.derive(1.0))
    with pytest.raises(ValueError, match="give certificates, or allow it explicitly"):
        Server(machine, TOKEN, "0.0.0.0")
    Server(machine, TOKEN, "0.0.0.0", tls=tls.server_context(node.info))
    Server(machine, TOKEN, "0.0.0.0", allow_remote=True)


def test_the_dates_of_a_running_job_are_looked_at_again(authority: Authority) -> None:
    async def scenario() -> None:
        warned = asyncio.Event()
        texts: list[str] = []

        def warn(text: str) -> None:
            texts.append(text)
            if len(texts) == 2:
                warned.set()

        lookout = tls.Lookout(period=DAY / 864_000, ahead=30 * DAY)
        watch = DateWatch(authority.issue("soon", ends=5 * DAY).info, lookout, warn)
        async with aio.timeout(10):
            await warned.wait()
        watch.close()
        assert all("soon.pem expires in 4 days" in text for text in texts)

    aio.run(scenario())


def test_the_launcher_and_its_processes_use_the_certificates(authority: Authority, tmp_path: Path) -> None:
    soon = authority.issue("launcher", ends=20 * DAY)
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    result = launch("--nproc-per-node=2", "--ft-warm=0", *soon.flags, script, 6, 0.05, tmp_path, "kill@3@1")
    assert result.code == 0, result
    assert result.out.count("done") == 2 and "rank 1 was killed by SIGKILL" in result.err, result
    assert "warning: " in result.err and "launcher.pem expires in 19 days" in result.err, result


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (lambda good, bad: good.flags[:2], "--ft-tls-ca missing"),
        (lambda good, bad: bad.flags, "TLS: .*too-old.pem has expired: it was valid until 20"),
        (lambda good, bad: [*good.flags[:1], *bad.flags[1:]], "is not the key of"),
    ],
)
def test_certificates_that_can_not_be_used_are_wrong_usage(authority, node, tmp_path, flags, words) -> None:
    import re

    bad = authority.issue("too-old", begins=-9 * DAY, ends=-DAY)
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    result = launch("--nproc-per-node=1", *flags(node, bad), script)
    assert result.code == 2, result
    assert re.search(words, result.err) and "ran" not in result.out, result
    assert "PRIVATE" not in result.err and "Traceback" not in result.err, result
