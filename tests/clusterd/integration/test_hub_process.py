"""ClusterD as a process of its own: its options, its end, and another that takes its place when it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from pathlib import Path

import grpc
import pytest

from evertrain import aio
from evertrain.cli import main as cli
from evertrain.clusterd import __main__ as command
from evertrain.clusterd.keep import PREFIX
from evertrain.clusterd.services.tokens import TOKEN_KEY, Tokens
from evertrain.kube.port import LEASE, POD_GROUP, Conflict
from tests.clusterd.hub import PATIENCE, Client, eventually, is_over, make_job
from tests.clusterd.process import Process, clusterd
from tests.operator.cluster import Cluster, cluster, until
from tests.ports import free_ports


async def health(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return line.split()[1]


async def test_it_serves_and_ends_in_order(tmp_path: Path):
    (port,) = free_ports(1)
    async with cluster(tmp_path) as here:
        uid = (await make_job(here))["metadata"]["uid"]
        options = ["-listen", "127.0.0.1:0", "--insecure", "--enable-healthz", f"-healthz-address={port}", "-maxAge=7"]
        async with clusterd(here, *options, "--timeline", str(tmp_path / "timeline.db")) as process:
            async with Client(uid, await process.port()) as client:
                await client.begin()
                assert await health(port) == b"200"
                assert await process.end() == 0, process.said()
                await asyncio.wait_for(client.ended.wait(), PATIENCE)
            assert (tmp_path / "timeline.db").exists()


async def test_who_stands_by_takes_over(tmp_path: Path):
    ports = free_ports(2)
    options = ["-listen", "127.0.0.1:0", "--insecure", "--leader-elect", "--enable-healthz", "-healthz-address"]
    async with cluster(tmp_path) as here:
        uid = (await make_job(here))["metadata"]["uid"]
        async with clusterd(here, *options, str(ports[0]), name="first") as first:
            port = await first.port()
            async with (
                clusterd(here, *options, str(ports[1]), name="second") as second,
                Client(uid, port) as client,
            ):
                await client.begin()
                await client.reports_fault(r3="0")
                await client.hears("stopTrain")
                await client.reports_stop()
                await client.hears("globalFault")
                await client.offers("retry")
                decision = await client.hears("changeStrategy")

                async def stands_by() -> bool:
                    with contextlib.suppress(OSError, IndexError):
                        return await health(ports[1]) == b"200"
                    return False

                await until(stands_by, PATIENCE)
                lease = await here.kube.get(LEASE, command.LEASE, "mindx-dl")
                first.kill()
                began = time.monotonic()
                async with Client(uid, await second.port()) as again:
                    print(f"the other one serves after {time.monotonic() - began:.1f} s")
                    after = await here.kube.get(LEASE, command.LEASE, "mindx-dl")
                    assert after["spec"]["holderIdentity"] != lease["spec"]["holderIdentity"]
                    await again.begin()
                    assert (await again.hears("changeStrategy")).uuid == decision.uuid
                    await again.reports_result("retry")
                    await eventually(here.kube, PREFIX + uid, is_over)
                    group = await here.kube.get(POD_GROUP, f"train-{uid}", "default")
                    assert group["metadata"]["annotations"]["ProcessRecoverStatus"] == "retry-success"


async def test_who_loses_the_lease_serves_again_in_the_same_process(tmp_path: Path):
    (port,) = free_ports(1)
    options = ["-listen", f"127.0.0.1:{port}", "--insecure", "--leader-elect", "--timeline", str(tmp_path / "t.db")]
    async with cluster(tmp_path) as here:
        uid = (await make_job(here))["metadata"]["uid"]
        async with clusterd(here, *options) as process:
            for _ in range(2):
                assert await process.port() == port
                async with Client(uid, port) as client:
                    await client.begin()
                    await take_lease(here, "somebody")
                    await asyncio.wait_for(client.ended.wait(), PATIENCE)
            assert await process.port() == port
            lease = await here.kube.get(LEASE, command.LEASE, "mindx-dl")
            assert lease["spec"]["holderIdentity"] != "somebody"
            assert await process.end() == 0, process.said()


async def take_lease(here: Cluster, who: str) -> None:
    while True:
        lease = await here.kube.get(LEASE, command.LEASE, "mindx-dl")
        lease["spec"] |= {"holderIdentity": who, "leaseDurationSeconds": 1}
        with contextlib.suppress(Conflict):
            await here.kube.replace(LEASE, lease)
            return


@pytest.mark.parametrize(
    "options, complaint",
    [
        ([], "neither certificates nor a secret"),
        (["--insecure", "--token-secret", "x"], "--insecure means neither"),
        (["--tls-ca", "x"], "TLS needs all of"),
        (["--token-secret", "/nowhere/secret"], "/nowhere/secret: No such file"),
        (["--insecure", "--listen", "0.0.0.0:0"], "serves on one address"),
        (["--insecure", "--kubeconfig", "/nowhere/config"], "/nowhere/config is not a usable kubeconfig"),
    ],
)
def test_what_can_not_be_is_said(options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]):
    assert command.main(options) == 2
    assert complaint in capsys.readouterr().err


async def test_a_port_that_is_taken_is_named(tmp_path: Path):
    async with cluster(tmp_path) as here, clusterd(here, "--insecure", "--listen", "127.0.0.1:0") as first:
        port = await first.port()
        async with clusterd(here, "--insecure", "--listen", f"127.0.0.1:{port}", name="second") as second:
            assert await second.code() == 2
            assert f"cannot listen on 127.0.0.1:{port}" in second.said()


async def test_with_tokens_a_job_speaks_for_itself_only(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef\n")
    async with cluster(tmp_path) as here:
        uid = (await make_job(here))["metadata"]["uid"]
        async with (
            clusterd(here, "--listen", "127.0.0.1:0", "--token-secret", str(secret)) as process,
            Client(uid, await process.port()) as client,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.call("Init")
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            token = Tokens.read(secret.read_bytes()).job(uid)
            status = await client.stub.Init(client.who, metadata=((TOKEN_KEY, token),), timeout=PATIENCE)
            assert status.code == 0


def test_the_command_line_knows_it(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(["clusterd", "-version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("clusterd version: ")
    assert cli.main(["clusterd"]) == 2
    assert "--insecure" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["up", "--clusterd-addr", "0.0.0.0:8899"])
    assert "serves this machine only" in capsys.readouterr().err


async def test_up_without_it_and_it_alone_beside(tmp_path: Path):
    """`evertrain up --no-clusterd`, and `evertrain clusterd` in a process of its own; both end in order."""
    up = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "evertrain.cli", "up", "--no-clusterd", "--nodes", "1", "--data-dir", str(tmp_path),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert up.stdout is not None
        async with aio.timeout(PATIENCE):
            said = b""
            while b"ends it and its pods" not in (line := await up.stdout.readline()):
                assert line and b"ClusterD leads" not in line
                said += line
        assert b"Without ClusterD nobody recovers jobs" in said, "what that costs"
        alone = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "evertrain.cli", "clusterd", "--insecure", "--listen", "127.0.0.1:0",
            "--kubeconfig", str(tmp_path / "kubeconfig"), stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            await Process(alone, tmp_path / "none").port()
            alone.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(alone.wait(), PATIENCE) == 0
        finally:
            if alone.returncode is None:
                alone.kill()
            await alone.wait()
        up.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(up.wait(), PATIENCE) == 0
    finally:
        if up.returncode is None:
            up.kill()
        await up.wait()
