"""Orders to ClusterD about a job, as a platform gives them: finding both, showing a token, waiting for the result."""

from __future__ import annotations

import argparse
import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from evertrain.acjob import names
from evertrain.cli import connection
from evertrain.cli.connection import Connection
from evertrain.cli.running import CommandError
from evertrain.kube.port import ASCEND_JOB, POD, SECRET, SERVICE, NotFound, Object
from evertrain.wire import recover_pb2 as wire
from evertrain.wire import service

RECOVER = wire.DESCRIPTOR.services_by_name["Recover"]
TOKEN = "x-job-token"
CALL = 30.0
"""Seconds for ClusterD to take the order."""


@dataclass(frozen=True)
class Order:
    call: str
    message: Any
    answers: str
    """The call by which the result is to be had."""
    request: Any


@dataclass(frozen=True)
class Found:
    uid: str
    pods: list[Object]
    address: str
    """Of ClusterD."""
    token: str
    """That of the job, by which it is let in itself; empty where ClusterD asks for none."""
    cluster: Path
    """The folder with the kubeconfig: an embedded cluster has everything in it."""


async def find(arguments: argparse.Namespace) -> Found:
    kubeconfig = connection.choose_kubeconfig(arguments.kubeconfig, arguments.data_dir)
    kube = connection.connect(kubeconfig)
    try:
        namespace = arguments.namespace or kube.namespace
        job = await _job(kube, arguments.job, namespace)
        pods = (await kube.list(POD, namespace, labels=f"{names.JOB_NAME}={arguments.job}")).items
        address = arguments.clusterd or await _address(kube)
        token = await _token(kube, job)
        return Found(str(job["metadata"]["uid"]), list(pods), address, token, kubeconfig.parent)
    finally:
        await kube.close()


async def give(order: Order, address: str, token: str, arguments: argparse.Namespace) -> str:
    """ClusterD's word about the end of it. The answer can be had only when the order is given: as late as that."""
    metadata = ((TOKEN, token),) if token else ()
    try:
        async with _channel(address, arguments) as channel:
            recover = service.stub(channel, RECOVER)
            status = await getattr(recover, order.call)(order.message, timeout=CALL, metadata=metadata)
            if status is None or status.code != 0:
                said = f"ClusterD refused: {status.code} {status.info}" if status else "ClusterD answers nonsense"
                raise CommandError(said)
            answers = getattr(recover, order.answers)(order.request, timeout=arguments.timeout, metadata=metadata)
            async for answer in answers:
                if answer is not None:
                    return str(answer.msg)
    except grpc.aio.AioRpcError as error:
        raise CommandError(reason(error, address)) from None
    raise CommandError("ClusterD has not said how it went")


async def _job(kube: Connection, name: str, namespace: str) -> Object:
    try:
        return await kube.get(ASCEND_JOB, name, namespace)
    except NotFound:
        raise CommandError(f"there is no job {name} in namespace {namespace} (-n names another)") from None


async def _address(kube: Connection) -> str:
    try:
        found = await kube.get(SERVICE, names.CLUSTERD_SERVICE, names.CLUSTERD_NAMESPACE)
        address = (found["metadata"].get("annotations") or {}).get(names.CLUSTERD_ADDRESS)
        return address or f"{found['spec']['clusterIP']}:{found['spec']['ports'][0]['port']}"
    except (NotFound, KeyError, IndexError):
        raise CommandError("this cluster has no Service of ClusterD; --clusterd says where it serves") from None


async def _token(kube: Connection, job: Object) -> str:
    metadata = job["metadata"]
    name = f"{metadata['name']}{names.TOKEN_SECRET}-{metadata['uid']}"
    try:
        secret = await kube.get(SECRET, name, metadata["namespace"])
    except NotFound:
        return ""
    return base64.b64decode((secret.get("data") or {}).get(names.TOKEN_KEY) or "").decode()


def _channel(address: str, arguments: argparse.Namespace) -> Any:
    if arguments.tls_ca is None:
        return grpc.aio.insecure_channel(address)
    files = (arguments.tls_ca, arguments.tls_key, arguments.tls_cert)
    credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
    options = [("grpc.ssl_target_name_override", names.CLUSTERD_DOMAIN)]
    return grpc.aio.secure_channel(address, credentials, options=options)


def reason(error: grpc.aio.AioRpcError, address: str) -> str:
    text = " ".join((error.details() or "").split())
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        forward = f"kubectl port-forward -n {names.CLUSTERD_NAMESPACE} service/{names.CLUSTERD_SERVICE} 8899"
        return f"ClusterD at {address} can't be reached: {text}; from outside of its cluster `{forward}`, --clusterd"
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return "ClusterD has not said in time how it went; `evertrain timeline` will"
    return f"ClusterD refused: {text}"
