"""ClusterD with the Secrets of `evertrain credentials`, and a client with what the operator gives to jobs."""

from __future__ import annotations

import base64
from pathlib import Path

import grpc
import pytest

from evertrain import aio
from evertrain.acjob import names
from evertrain.cli import credentials
from evertrain.kube.port import SECRET
from evertrain.wire import health_pb2
from tests.clusterd.process import clusterd
from tests.operator.cluster import Cluster, cluster
from tests.requests_asked import Recording


async def mounted(here: Cluster, name: str) -> Path:
    """As the kubelet does."""
    folder = here.folder / name
    folder.mkdir()
    item = await here.kube.get(SECRET, name, names.CLUSTERD_NAMESPACE)
    for key, value in item["data"].items():
        (folder / key).write_bytes(base64.b64decode(value))
    return folder


async def asked(port: int, shown: grpc.ChannelCredentials | None) -> int:
    options = [("grpc.ssl_target_name_override", names.CLUSTERD_DOMAIN)]
    where = f"127.0.0.1:{port}"
    made = grpc.aio.secure_channel(where, shown, options) if shown else grpc.aio.insecure_channel(where)
    async with made as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        return int((await check(health_pb2.HealthCheckRequest(), timeout=20)).status)


def test_a_job_reaches_clusterd_with_what_it_was_given_and_nobody_without(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as here:
            client = here.client()
            await credentials.make(Recording(client, "credentials"), names.CLUSTERD_NAMESPACE)
            await client.close()
            server, job, tokens = [
                await mounted(here, name) for name in (credentials.SERVER, credentials.JOBS, credentials.TOKENS)
            ]
            options = ("--listen", "127.0.0.1:0", "--tls-dir", str(server))
            async with clusterd(here, *options, "--token-secret", str(tokens / credentials.SECRET_KEY)) as process:
                port = await process.port()
                authority, certificate, key = ((job / name).read_bytes() for name in names.TLS_VARIABLES.values())
                shown = grpc.ssl_channel_credentials(authority, key, certificate)
                assert await asked(port, shown) == health_pb2.HealthCheckResponse.SERVING
                for other in (grpc.ssl_channel_credentials(authority), None):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await asked(port, other)
                    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
                assert await process.end() == 0

    aio.run(test())
