"""ClusterD's port: who is let in, how much of everything, health, reflection, and what is no request at all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from evertrain import aio
from evertrain.clusterd.recover.events import Signal
from evertrain.clusterd.services import server, streams
from evertrain.clusterd.services.access import Security
from evertrain.clusterd.services.certificates import Certificates
from evertrain.clusterd.services.limits import Limits
from evertrain.clusterd.services.server import Server
from evertrain.clusterd.services.tokens import TOKEN_KEY, Tokens
from evertrain.taskd.manager.clusterd import ClusterD
from evertrain.taskd.net import security as job_side
from evertrain.wire import config_pb2, fault_pb2, health_pb2, job_pb2, profiling_pb2, pubfault_pb2, recover_pb2
from evertrain.wire import reflection_pb2 as reflection
from tests.certificates import DAY, Authority, Issued, careless
from tests.clusterd.services import JOB, SERVICES, Client, MemoryHub, a_job, client, failure, serving, soon

WHO = recover_pb2.ClientInfo(jobId=JOB, role="taskd")
UNKNOWN, UNAUTHENTICATED = grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAUTHENTICATED
SECRET = b"a secret that nobody may see"
TOKENS = Tokens([SECRET])


# Tokens.


def shown(token: str) -> dict[str, Any]:
    return {"metadata": ((TOKEN_KEY, token),)}


async def outcomes(caller: Client, token: str | None) -> dict[str, grpc.StatusCode]:
    """How each method ends for who shows this token; streams when they begin."""
    options = shown(token) if token is not None else {}
    found = {}
    for module in SERVICES:
        for method in module.SERVICE.methods:
            if method.client_streaming:
                continue
            request = REQUESTS[method.input_type.full_name]
            call = getattr(getattr(caller, module.SERVICE.name), method.name)(request, **options)
            if method.server_streaming:
                await soon(call.initial_metadata())
                code = await soon(call.code()) if call.done() else grpc.StatusCode.OK
                call.cancel()
            else:
                code = await soon(call.code())
            found[method.full_name] = code
    return found


REQUESTS = {
    message.DESCRIPTOR.full_name: message
    for message in (
        recover_pb2.ClientInfo(jobId=JOB),
        recover_pb2.StopCompleteRequest(jobId=JOB),
        recover_pb2.RecoverStrategyRequest(jobId=JOB),
        recover_pb2.RecoverStatusRequest(jobId=JOB),
        recover_pb2.ProcessFaultRequest(jobId=JOB),
        recover_pb2.SwitchNics(jobID=JOB),
        recover_pb2.SwitchNicRequest(jobID=JOB),
        recover_pb2.SwitchResult(jobId=JOB),
        recover_pb2.StressTestParam(jobID=JOB),
        recover_pb2.StressTestRequest(jobID=JOB),
        recover_pb2.StressTestResult(jobId=JOB),
        fault_pb2.ClientInfo(jobId=JOB, role="x"),
        job_pb2.ClientInfo(role="CCAgent"),
        config_pb2.ClientInfo(jobId=JOB, role="x"),
        pubfault_pb2.PublicFaultRequest(),
        profiling_pb2.DataTypeReq(jobNsName="default/train"),
        profiling_pb2.DataStatusReq(jobNsName="default/train"),
        profiling_pb2.ProfilingClientInfo(jobId=JOB),
        health_pb2.HealthCheckRequest(),
    )
}
OF_PLATFORM = {
    "Recover.StressTest",
    "job.Job.Register",
    "job.Job.SubscribeJobSummarySignal",
    "job.Job.SubscribeJobSummarySignalList",
    "PubFault.SendPublicFault",
    "TrainingDataTrace.ModifyTrainingDataTraceSwitch",
    "TrainingDataTrace.GetTrainingDataTraceSwitch",
}
OF_ALL = {"grpc.health.v1.Health.Check", "grpc.health.v1.Health.Watch"}


@pytest.mark.parametrize(
    ("token", "open_to"),
    [
        (None, "all"),
        ("", "all"),
        ("wrong", "all"),
        (TOKENS.job("another job"), "all"),
        (Tokens([b"the secret of another cluster"]).job(JOB), "all"),
        (TOKENS.job(JOB), "job"),
        (TOKENS.platform(), "platform"),
    ],
    ids=["none", "empty", "wrong", "of-another-job", "of-another-cluster", "of-the-job", "of-the-platform"],
)
async def test_every_method_asks_for_the_right_token(token: str | None, open_to: str) -> None:
    async with serving(Security(tokens=TOKENS)) as up, client(up.address) as caller:
        found = await outcomes(caller, token)
        refused = {name for name, code in found.items() if code == UNAUTHENTICATED}
        expected = {"all": set(found) - OF_ALL, "job": OF_PLATFORM, "platform": set()}[open_to]
        assert refused == expected
        if open_to == "all":
            assert not up.hub.inited and not up.hub.public


async def test_faults_of_the_whole_cluster_are_for_the_platform() -> None:
    hub = MemoryHub()
    hub.jobs[""] = hub.jobs["-1"] = a_job()
    async with serving(Security(tokens=TOKENS), hub=hub) as up, client(up.address) as caller:
        for name in ("", "-1"):
            who = fault_pb2.ClientInfo(jobId=name, role="x")
            for call in (caller.Fault.Register, caller.Fault.GetFaultMsgSignal):
                for token in (TOKENS.job(name), TOKENS.job(JOB)):
                    assert (await failure(call(who, **shown(token))))[0] == UNAUTHENTICATED
            assert (await soon(caller.Fault.Register(who, **shown(TOKENS.platform())))).code == 200


async def test_the_manager_of_taskd_shows_its_token(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    heard: asyncio.Queue[Any] = asyncio.Queue()
    led: asyncio.Queue[bool] = asyncio.Queue()
    security = job_side.Security(TOKENS.job(JOB))
    async with serving(Security(tokens=TOKENS)) as up:
        manager = ClusterD(up.address, JOB, security=security, signal=heard.put_nowait, leads=led.put_nowait)
        await manager.start()
        try:
            assert await soon(led.get()) is True
            up.hub.said.publish(JOB, Signal("stopTrain", "u1"))
            assert (await soon(heard.get())).uuid == "u1"
        finally:
            await manager.close()
    assert TOKENS.job(JOB) not in caplog.text and SECRET.decode() not in caplog.text


def test_nothing_that_keeps_nobody_out_unless_it_is_wanted() -> None:
    with pytest.raises(ValueError, match="neither certificates nor a secret"):
        Security()
    assert Security(insecure=True).tokens is None
    assert SECRET.decode() not in repr(Security(tokens=TOKENS))


def test_the_token_is_what_openssl_makes_of_the_secret() -> None:
    """As `openssl dgst -sha256 -hmac SECRET` does: its library is asked, for its command is not everywhere."""
    for text, token in ((f"job:{JOB}", TOKENS.job(JOB)), ("platform", TOKENS.platform())):
        made = HMAC(SECRET, SHA256())
        made.update(text.encode())
        assert made.finalize().hex() == token


# Certificates.


def files(issued: Issued) -> Certificates:
    return Certificates(Path(issued.ca), Path(issued.cert), Path(issued.key))


def credentials(issued: Issued | None, authority: str) -> grpc.ChannelCredentials:
    ca = Path(authority).read_bytes()
    if issued is None:
        return grpc.ssl_channel_credentials(ca)
    return grpc.ssl_channel_credentials(ca, Path(issued.key).read_bytes(), Path(issued.cert).read_bytes())


NAMED = {"grpc.ssl_target_name_override": "server"}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    (tmp_path / "stranger").mkdir()
    return Authority(tmp_path / "stranger")


async def test_both_sides_show_a_certificate(authority: Authority, stranger: Authority) -> None:
    ours = authority.issue("server")
    async with serving(Security(files(ours))) as up:
        async with client(up.address, credentials(authority.issue("client"), ours.ca), **NAMED) as caller:
            assert (await soon(caller.Recover.Init(WHO))).code == 0
            await soon(caller.Recover.Register(WHO))
            stream = caller.Recover.SubscribeProcessManageSignal(WHO)
            await soon(stream.initial_metadata())
            up.hub.said.publish(JOB, Signal("stopTrain", "u1"))
            assert (await soon(stream.read())).uuid == "u1"
        for bad in (None, stranger.issue("client"), authority.issue("old", begins=-2 * DAY, ends=-DAY)):
            async with client(up.address, credentials(bad, ours.ca), **NAMED) as caller:
                assert (await failure(caller.Recover.Init(WHO)))[0] == grpc.StatusCode.UNAVAILABLE
        async with client(up.address) as plain:
            assert (await failure(plain.Recover.Init(WHO)))[0] == grpc.StatusCode.UNAVAILABLE
        async with client(up.address, credentials(authority.issue("again"), ours.ca), **NAMED) as caller:
            assert (await soon(caller.Recover.Init(WHO))).code == 0, "the strangers have left no trace"


async def test_with_certificates_and_tokens_both_are_needed(authority: Authority) -> None:
    ours = authority.issue("server")
    async with (
        serving(Security(files(ours), TOKENS)) as up,
        client(up.address, credentials(authority.issue("client"), ours.ca), **NAMED) as caller,
    ):
        assert (await failure(caller.Recover.Init(WHO)))[0] == UNAUTHENTICATED
        assert (await soon(caller.Recover.Init(WHO, **shown(TOKENS.job(JOB))))).code == 0


async def test_the_manager_of_taskd_with_certificates(authority: Authority) -> None:
    ours, theirs = authority.issue("server"), authority.issue("client")
    certificates = job_side.Certificates(Path(theirs.ca), Path(theirs.cert), Path(theirs.key))
    async with serving(Security(files(ours))) as up:
        link = ClusterD(
            up.address, JOB, security=job_side.Security("", certificates), name="server"
        )  # fmt: skip
        await link.open()
        try:
            assert await soon(link.init()) is True
        finally:
            await link.close()


async def test_renewed_certificates_count_without_a_restart(authority: Authority, tmp_path: Path) -> None:
    mounted = Certificates(tmp_path / "m-ca.pem", tmp_path / "m-cert.pem", tmp_path / "m-key.pem")

    def mount(issued: Issued) -> None:
        targets = (mounted.authority, mounted.certificate, mounted.key)
        for source, target in zip((issued.ca, issued.cert, issued.key), targets, strict=True):
            fresh = target.with_suffix(".new")
            shutil.copy(source, fresh)
            fresh.replace(target)

    first, second = authority.issue("first"), authority.issue("second")
    mount(first)

    async def served(up: Any) -> int:
        """The serial number of what a new connection is shown."""
        mine = authority.issue("client")
        context = careless(mine.ca, mine)
        context.set_alpn_protocols(["h2"])
        host, port = up.address.split(":")
        _, writer = await soon(asyncio.open_connection(host, int(port), ssl=context))
        try:
            return int(writer.get_extra_info("peercert")["serialNumber"], 16)
        finally:
            writer.close()

    async with serving(Security(mounted)) as up:
        assert await served(up) == first.serial
        mount(second)
        assert await served(up) == second.serial
        mounted.key.write_bytes(b"no key at all")
        assert await served(up) == second.serial, "what can't be used does not count"


async def test_certificates_that_cannot_be_used_are_named(authority: Authority) -> None:
    issued = authority.issue("server", begins=-2 * DAY, ends=-DAY)
    server = Server(MemoryHub(), Security(files(issued)))
    with pytest.raises(ValueError, match="has expired"):
        await server.start("127.0.0.1:0")
    await server.close()


# Limits.


async def test_sixty_four_streams_on_a_connection() -> None:
    hub = MemoryHub()
    names = [f"job-{number}" for number in range(65)]
    hub.members.update(names)
    async with serving(hub=hub) as up, client(up.address) as caller, client(up.address) as other:

        def subscribe(who: Client, job: str) -> Any:
            return who.Recover.SubscribeNotifySwitch(recover_pb2.ClientInfo(jobId=job))

        open_ones = [subscribe(caller, job) for job in names[:64]]
        for stream in open_ones:
            await soon(stream.initial_metadata())
        waiting = subscribe(caller, names[64])
        began = asyncio.ensure_future(waiting.initial_metadata())
        assert (await soon(other.Recover.HealthCheck(WHO))).code == 0, "another connection has its own"
        assert not began.done() and names[64] not in hub.nics
        open_ones[0].cancel()
        await soon(began)
        assert names[64] in hub.nics


async def test_messages_of_four_mebibytes_and_no_more() -> None:
    async with serving() as up, client(up.address) as caller:
        fits = recover_pb2.ClientInfo(jobId="x" * ((4 << 20) - 100))
        # The answer has the id in it, and may be larger.
        assert len((await soon(caller.Recover.HealthCheck(fits))).info) > len(fits.jobId)
        giant = recover_pb2.ClientInfo(jobId="x" * (4 << 20))
        assert (await failure(caller.Recover.HealthCheck(giant)))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await soon(caller.Recover.HealthCheck(WHO))).code == 0


async def test_what_is_too_large_to_be_sent_fails_and_nothing_else() -> None:
    who = config_pb2.ClientInfo(jobId="mindie", role="x")
    async with serving() as up, client(up.address) as caller:
        await soon(caller.Config.Register(who))
        stream = caller.Config.SubscribeRankTable(who)
        assert (await soon(stream.read())).rankTable == "{}"
        up.hub.tables["mindie"].publish("x" * ((8 << 20) - 1000))
        assert len((await soon(stream.read())).rankTable) == (8 << 20) - 1000
        up.hub.tables["mindie"].publish("x" * (8 << 20))
        assert (await failure(stream.read()))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await soon(caller.Recover.HealthCheck(WHO))).code == 0


async def test_more_calls_than_the_rate_are_refused_but_not_health_checks() -> None:
    async with serving(limits=Limits(calls=3)) as up, client(up.address) as caller:
        init = [caller.Recover.Init(WHO) for _ in range(40)]
        mixed = [caller.Config.Register(config_pb2.ClientInfo(jobId="x")) for _ in range(40)]
        ends = await soon(asyncio.gather(*init, *mixed, return_exceptions=True))
        refused = [error for error in ends if isinstance(error, grpc.aio.AioRpcError)]
        assert 3 <= len(ends) - len(refused) < 80
        assert {error.code() for error in refused} == {UNKNOWN}
        assert {error.details() for error in refused} == {
            "qps exceeded, method=/Recover/Init",
            "qps exceeded, method=/config.Config/Register",
        }
        checks = await soon(asyncio.gather(*(caller.Recover.HealthCheck(WHO) for _ in range(40))))
        assert {check.code for check in checks} == {0}
        probes = [caller.Health.Check(health_pb2.HealthCheckRequest()) for _ in range(40)]
        assert len(await soon(asyncio.gather(*probes))) == 40


@contextlib.asynccontextmanager
async def connection(address: str, source: str = "127.0.0.1") -> AsyncIterator[tuple[Any, Any]]:
    host, port = address.split(":")
    reader, writer = await soon(asyncio.open_connection(host, int(port), local_addr=(source, 0)))
    try:
        yield reader, writer
    finally:
        writer.close()


async def stays(link: tuple[Any, Any]) -> bool:
    """gRPC greets who may stay, and the others are reset."""
    reader, writer = link
    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        return bool(await soon(reader.read(9)))
    except ConnectionResetError:
        return False


async def test_connections_are_limited_in_all_and_from_one_address() -> None:
    limits = Limits(connections=5, connections_of_source=3)
    async with serving(limits=limits) as up, contextlib.AsyncExitStack() as stack:

        async def enter(source: str) -> Any:
            return await stack.enter_async_context(connection(up.address, source))

        first = [await enter("127.0.0.1") for _ in range(3)]
        assert [await stays(link) for link in first] == [True] * 3
        assert not await stays(await enter("127.0.0.1"))
        second = [await enter("127.0.0.2") for _ in range(2)]
        assert [await stays(link) for link in second] == [True] * 2
        assert not await stays(await enter("127.0.0.3"))
        first[0][1].close()
        async with aio.timeout(90):  # who goes makes room
            while not await stays(await enter("127.0.0.3")):
                await asyncio.sleep(0.01)
    assert Limits() == Limits(1024, 512, 64, 4 << 20, 8 << 20, 10_000, 1000)


async def test_a_line_that_is_reset_in_the_middle_leaves_nothing() -> None:
    async with serving() as up:
        for _ in range(20):
            async with connection(up.address) as (_, writer):
                writer.write(random.randbytes(2000))
                linger = b"\x01\0\0\0\0\0\0\0"
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
        async with client(up.address) as caller:
            assert (await soon(caller.Recover.HealthCheck(WHO))).code == 0
        gate = up.server._gate
        async with aio.timeout(90):
            while gate._connections.total:
                await asyncio.sleep(0.01)


async def test_an_address_that_is_taken_or_none() -> None:
    async with serving() as up:
        for address in (up.address, "127.0.0.1", "127.0.0.1:port", "127.0.0.1:99999", "not-a-host.invalid:1"):
            server = Server(MemoryHub(), Security(insecure=True))
            with pytest.raises(OSError, match="cannot listen on"):
                await server.start(address)
            await server.close()


async def test_who_does_not_take_messages_at_all_loses_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that our own queue would not notice: it has not many messages, but large ones."""
    monkeypatch.setattr(streams, "SEND_LIMIT", 0.2)
    hub = MemoryHub()
    hub.members.add(JOB)
    async with serving(hub=hub) as up, client(up.address, **{"grpc.http2.bdp_probe": 0}) as caller:
        stream = caller.Recover.SubscribeProcessManageSignal(WHO)
        await soon(stream.initial_metadata())
        for _ in range(10):
            hub.said.publish(JOB, Signal("stopTrain", "x" * (4 << 20)))
        assert await soon(hub.left.get()) == JOB


# What is no request.


async def test_bytes_that_are_no_message_are_an_error_of_that_call() -> None:
    async with serving() as up, client(up.address) as caller:
        for module in SERVICES:
            for method in module.SERVICE.methods:
                path = f"/{module.SERVICE.full_name}/{method.name}"
                kind = {
                    (False, False): "unary_unary",
                    (False, True): "unary_stream",
                    (True, True): "stream_stream",
                }[method.client_streaming, method.server_streaming]
                call = getattr(caller.channel, kind)(path)
                bad = b"\x0a\xff\xff\xff\xff\x0f"
                if kind == "unary_unary":
                    end = await failure(call(bad))
                elif kind == "unary_stream":
                    end = await failure(call(bad).read())
                else:
                    stream = call()
                    await soon(stream.write(bad))
                    end = await failure(stream.read())
                assert end == (grpc.StatusCode.INTERNAL, "grpc: error unmarshalling request"), path
        assert (await soon(caller.Recover.HealthCheck(WHO))).code == 0


async def test_methods_that_are_not_there() -> None:
    async with serving() as up, client(up.address) as caller:
        for path in ("/Recover/Nothing", "/fault.Recover/Init", "/", "/Recover", "/recover.Recover/Init"):
            end = await failure(caller.channel.unary_unary(path)(b""))
            assert end[0] == grpc.StatusCode.UNIMPLEMENTED, path
        assert (await soon(caller.Recover.HealthCheck(WHO))).code == 0


async def test_garbage_on_the_port() -> None:
    async with serving() as up, client(up.address) as caller:
        await soon(caller.Recover.HealthCheck(WHO))
        for garbage in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01" + bytes(600), b"\0" * 5000):
            async with connection(up.address) as (reader, writer):
                writer.write(garbage)
                with contextlib.suppress(ConnectionResetError):
                    while await soon(reader.read(1000)):
                        pass
        assert (await soon(caller.Recover.HealthCheck(WHO))).code == 0


# Health and reflection.


async def test_clients_may_ping_every_three_seconds_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of that here. Who may not is told to go at the third ping."""
    name = "grpc.http2.min_ping_interval_without_data_ms"
    theirs = server.options

    def quicker(limits: Limits) -> list[tuple[str, int]]:
        return [(key, value // 100 if key == name else value) for key, value in theirs(limits)]

    assert dict(theirs(Limits()))[name] < 3000
    monkeypatch.setattr(server, "options", quicker)
    settings, ping, go_away = 4, 6, 7
    async with serving() as up, connection(up.address) as (reader, writer):
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(settings))
        for number in range(6):
            writer.write(frame(ping, number.to_bytes(8, "big")))
            kind = settings
            while kind != ping:
                head = await soon(reader.readexactly(9))
                kind = head[3]
                body = await soon(reader.readexactly(int.from_bytes(head[:3], "big")))
                assert kind != go_away, body
            await asyncio.sleep(0.03)  # from the answer on, so that they never come closer together


def frame(kind: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, 0]) + b"\0\0\0\0" + body


async def test_health() -> None:
    serves = health_pb2.HealthCheckResponse.ServingStatus
    async with serving() as up, client(up.address) as caller:

        async def check(service: str) -> int:
            return int((await soon(caller.Health.Check(health_pb2.HealthCheckRequest(service=service)))).status)

        watch = caller.Health.Watch(health_pb2.HealthCheckRequest(service="Recover"))
        assert (await soon(watch.read())).status == serves.NOT_SERVING
        assert await check("") == serves.NOT_SERVING
        up.server.health.set(True)
        assert (await soon(watch.read())).status == serves.SERVING
        for service in ("", "Recover", "fault.Fault", "TrainingDataTrace"):
            assert await check(service) == serves.SERVING
        unknown = health_pb2.HealthCheckRequest(service="nothing")
        assert (await failure(caller.Health.Check(unknown)))[0] == grpc.StatusCode.NOT_FOUND
        assert (await soon(caller.Health.Watch(unknown).read())).status == serves.SERVICE_UNKNOWN
        up.server.health.set(False)
        assert (await soon(watch.read())).status == serves.NOT_SERVING


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_a_client_that_knows_nothing_learns_all_by_reflection(version: str) -> None:
    async with serving() as up, client(up.address) as caller:
        stream = caller.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection.ServerReflectionResponse.FromString,
        )()

        async def ask(**question: str) -> Any:
            await soon(stream.write(reflection.ServerReflectionRequest(host="here", **question)))
            return await soon(stream.read())

        answer = await ask(list_services="*")
        names = [each.name for each in answer.list_services_response.service]
        assert answer.valid_host == "here" and answer.original_request.list_services == "*"
        assert set(names) == {module.SERVICE.full_name for module in SERVICES}
        pool = DescriptorPool()
        for name in names:
            for content in (await ask(file_containing_symbol=name)).file_descriptor_response.file_descriptor_proto:
                pool.Add(FileDescriptorProto.FromString(content))
        for module in SERVICES:
            theirs = pool.FindServiceByName(module.SERVICE.full_name)
            assert [method.name for method in theirs.methods] == [method.name for method in module.SERVICE.methods]
        signal = pool.FindMessageTypeByName("ProcessManageSignal")
        assert signal.fields_by_name["extraParams"].number == 9
        assert (await ask(file_by_filename="recover.proto")).file_descriptor_response.file_descriptor_proto
        assert (await ask(file_containing_symbol="fault.NodeFaultInfo.nodeSN")).HasField("file_descriptor_response")
        numbers = (await ask(all_extension_numbers_of_type="Status")).all_extension_numbers_response
        assert (numbers.base_type_name, list(numbers.extension_number)) == ("Status", [])
        for question in ({"file_by_filename": "/etc/passwd"}, {"file_containing_symbol": "Nothing"}, {}):
            assert (await ask(**question)).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
        await soon(stream.done_writing())
        assert await soon(stream.read()) is grpc.aio.EOF
