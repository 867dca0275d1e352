"""TaskNet with certificates on both sides and with the token of the job: who is let in, and what others are told."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from evertrain import aio
from evertrain.taskd import environment
from evertrain.taskd.manager.clusterd import ClusterD
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from evertrain.taskd.net.security import Certificates, Security
from evertrain.taskd.net.server import SERVICE, as_message
from evertrain.wire import service
from evertrain.wire.tasknet_pb2 import RegisterReq
from tests.certificates import DAY, Authority, Issued
from tests.taskd.cluster import ScriptedClusterD
from tests.taskd.integration.test_net import LOOPBACK, MANAGER, Tree, body

PROXY = Position("Proxy", "7", "1")
TOKEN = "a-secret-of-the-job"


def secured(issued: Issued, token: str = TOKEN) -> Security:
    return Security(token, Certificates(Path(issued.ca), Path(issued.cert), Path(issued.key)))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def test_a_tree_with_certificates_and_a_token(authority: Authority) -> None:
    async with Tree(2, secured(authority.issue())) as tree:
        assert await tree.agents[1].send(MANAGER, "up") == 0
        assert (await asyncio.wait_for(tree.manager.received.get(), 90)).body == "up"
        assert await tree.manager.send(Position("Worker", "1", "3"), "down") == 0
        assert await body(tree.workers[3]) == "down"


async def test_a_break_is_mended_under_tls(authority: Authority) -> None:
    async with Tree(1, secured(authority.issue())) as tree:
        await tree.replace_manager(secured(authority.issue("another")))
        assert await tree.agents[0].send(MANAGER, "again") == 0


async def refused(manager: Node, security: Security, caplog: pytest.LogCaptureFixture) -> str:
    """Why a proxy is not let in, in its own words."""
    caplog.set_level(logging.DEBUG)
    proxy = Node(PROXY, listen=LOOPBACK, upstream=f"127.0.0.1:{manager.port}", security=security)
    await proxy.start()
    try:
        async with aio.timeout(90):
            while not (told := [each for each in caplog.messages if "rebuild net" in each]):
                await asyncio.sleep(0.02)
        assert proxy.client is not None and not proxy.client.joined.is_set()
        assert manager.server is not None and PROXY not in manager.server.members
    finally:
        await proxy.close()
    assert TOKEN not in caplog.text and "PRIVATE KEY" not in caplog.text
    return told[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "other").mkdir()
    return tmp_path / "other"


async def test_a_stranger_is_not_let_in(authority: Authority, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its authority is another one, even if it has the same name; and neither does it trust the manager."""
    async with Tree(0, secured(authority.issue())) as tree:
        stranger = Authority(folder).issue()
        assert "the peer's certificate is refused: " in await refused(tree.manager, secured(stranger), caplog)


async def test_a_certificate_of_another_authority_is_not_enough(
    authority: Authority, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It trusts the manager; the manager does not trust it."""
    async with Tree(0, secured(authority.issue())) as tree:
        stranger = Authority(folder).issue()
        mixed = Issued(stranger.cert, stranger.key, authority.file, stranger.serial)
        told = await refused(tree.manager, secured(mixed), caplog)
    assert "certificate" in told or "authority" in told, told


async def test_no_certificate(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    async with Tree(0, secured(authority.issue())) as tree:
        assert "unavailable" in await refused(tree.manager, Security(TOKEN), caplog)
        authority_only = grpc.ssl_channel_credentials(Path(authority.file).read_bytes())
        options = [("grpc.ssl_target_name_override", "node")]
        async with grpc.aio.secure_channel(f"127.0.0.1:{tree.manager.port}", authority_only, options) as channel:
            request = RegisterReq(uuid="1", pos=as_message(PROXY))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await service.stub(channel, SERVICE).Register(request, metadata=secured_metadata(), timeout=10)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE


def secured_metadata() -> tuple[tuple[str, str], ...]:
    return Security(TOKEN).metadata()


async def test_tls_where_the_manager_has_none(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    async with Tree(0, Security(TOKEN)) as tree:
        assert "TLS: the peer does not speak TLS" in await refused(tree.manager, secured(authority.issue()), caplog)


@pytest.mark.parametrize("token", ["", "a-guess"])
@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
async def test_a_wrong_token_and_none(
    token: str, with_tls: bool, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = secured(authority.issue()).certificates if with_tls else None
    async with Tree(0, Security(TOKEN, certificates)) as tree:
        told = await refused(tree.manager, Security(token, certificates), caplog)
    assert "the token of the job is missing or wrong" in told
    assert not token or token not in caplog.text


async def test_every_method_asks_for_the_token(authority: Authority) -> None:
    async with (
        Tree(0, Security(TOKEN)) as tree,
        grpc.aio.insecure_channel(f"127.0.0.1:{tree.manager.port}") as channel,
    ):
        stub = service.stub(channel, SERVICE)
        await stub.Register(RegisterReq(uuid="1", pos=as_message(PROXY)), metadata=secured_metadata())
        where = (("role", "Proxy"), ("serverrank", "7"), ("processrank", "1"))
        for method in SERVICE.methods:
            call = getattr(stub, method.name)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                if method.client_streaming:
                    await call(metadata=where).read()
                else:
                    await call(service.GetMessageClass(method.input_type)())
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED, method.name


@pytest.mark.parametrize("name", ["clusterd.example", "another.example"])
async def test_clusterd_has_to_have_its_name(name: str, authority: Authority) -> None:
    security, clusterd = secured(authority.issue("clusterd.example")), ScriptedClusterD()
    await clusterd.start(security.certificates)
    link = ClusterD(f"127.0.0.1:{clusterd.port}", "job-1", security=security, name=name)
    try:
        await link.open()
        if name == "clusterd.example":
            assert (await link.register()).code == 0
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await link.register()
    finally:
        await link.close()
        await clusterd.stop()


@pytest.mark.parametrize(
    ("broken", "words"),
    [("ends", "expired"), ("begins", "not valid before"), ("key", "is not the key of"), ("missing", "No such file")],
)
def test_files_that_can_not_be_used_are_named_at_start(
    broken: str, words: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"begins": -2 * DAY, "ends": -DAY} if broken == "ends" else {"begins": DAY} if broken == "begins" else {}
    issued = authority.issue("mine", **times)
    key = authority.issue("other").key if broken == "key" else issued.key
    monkeypatch.setenv("TASKD_TLS_CA", issued.ca)
    monkeypatch.setenv("TASKD_TLS_CERT", "/nowhere.pem" if broken == "missing" else issued.cert)
    monkeypatch.setenv("TASKD_TLS_KEY", key)
    with pytest.raises(ValueError) as error:
        environment.security()
    assert words in str(error.value) and ".pem" in str(error.value), error.value


def test_a_manager_whose_certificate_has_ended_says_so(authority: Authority, tmp_path: Path) -> None:
    issued = authority.issue(ends=timedelta(seconds=-1))
    code = (
        "from taskd.api import init_taskd_manager\n"
        "print(init_taskd_manager({'job_id': 'j', 'node_nums': 1, 'proc_per_node': 1}))"
    )
    variables = {"TASKD_TLS_CA": issued.ca, "TASKD_TLS_CERT": issued.cert, "TASKD_TLS_KEY": issued.key}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True,
        env={"PYTHONPATH": ":".join(sys.path), "EVERTRAIN_TOKEN": TOKEN, "TASKD_LOG_STDOUT": "False", **variables},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "False"
    logs = "".join(file.read_text() for file in (tmp_path / "taskd_log").iterdir())
    assert "failed to init taskd manager" in logs and issued.cert in logs
    assert TOKEN not in logs + done.stdout + done.stderr
