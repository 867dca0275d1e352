"""Where ClusterD of an embedded cluster serves, and how its pods find it.

Pods look for ClusterD at the address of a Service, MINDX_SERVER_IP. Here Services have addresses of their own, and
nothing forwards from one to the other; so ClusterD listens at that address, in the pods' network if they have one of
their own, besides the one that the user named. Both sockets are bound before anything else starts and stay so: if
ClusterD has to be started again, who connects meanwhile waits instead of being refused.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from evertrain.acjob import names
from evertrain.clusterd.services.access import Security
from evertrain.clusterd.services.tokens import Tokens
from evertrain.embedded.certificates import write_private
from evertrain.embedded.network.fabric import Fabric
from evertrain.kube.port import SERVICE, AlreadyExists, Kube, NotFound, Object

ADDRESS = "127.0.0.1:8899"
FREE = "127.0.0.1:0"
KEYS, SECRET = "keys", "clusterd-secret"
LABEL = "evertrain.dev/embedded"
FREE_PORTS = range(12_000, 29_000)
"""Below those that the system hands out to whoever asks: until we listen, nobody gets it by chance."""
TRIES = 100


class Unusable(Exception):
    """The text is for the user."""


def split(address: str) -> tuple[str, int]:
    """Raises Unusable if it isn't HOST:PORT with an address of the loopback interface."""
    host, colon, port = address.rpartition(":")
    try:
        loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        loopback = False
    if not colon or not loopback or not port.isdecimal() or int(port) > 65535:
        raise Unusable(
            f"{address!r} is not an address like {ADDRESS}: ClusterD of this cluster serves this machine only"
        )
    return host, int(port)


@dataclass(frozen=True)
class Place:
    """Where ClusterD serves."""

    sockets: tuple[socket.socket, ...]
    host: str
    service: str
    port: int

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def environment(self) -> dict[str, str]:
        """What containers need to know beside the address, which the operator tells them."""
        return {"MINDX_SERVER_PORT": str(self.port)}

    def close(self) -> None:
        for each in self.sockets:
            each.close()


async def take_place(kube: Kube, address: str, fabric: Fabric | None = None, *, elsewhere: bool = False) -> Place:
    """Binds the sockets, and has the Service say so. `elsewhere`: if the port is in use, another. Raises Unusable."""
    host, port = split(address)
    service = await _service(kube)
    where = str(service["spec"]["clusterIP"])
    here = (host,) if fabric is not None else (host, where)
    sockets = _bind_free(*here) if port == 0 else _bind(port, *here, elsewhere=elsewhere)
    if fabric is not None:
        sockets = (*sockets, await fabric.listen(where, sockets[0].getsockname()[1]))
    place = Place(sockets, host, where, sockets[0].getsockname()[1])
    ports = [{"name": "grpc", "protocol": "TCP", "port": place.port, "targetPort": place.port}]
    # Addresses in the pods' network are nobody's on this machine, or somebody else's, who must not be shown a token.
    told = {"metadata": {"annotations": {names.CLUSTERD_ADDRESS: place.address}}, "spec": {"ports": ports}}
    await kube.patch(SERVICE, names.CLUSTERD_SERVICE, names.CLUSTERD_NAMESPACE, told)
    return place


async def leave(kube: Kube) -> None:
    """Without ClusterD: pods must not look for the one of an earlier start."""
    with contextlib.suppress(NotFound):
        service = await kube.get(SERVICE, names.CLUSTERD_SERVICE, names.CLUSTERD_NAMESPACE)
        if LABEL in (service["metadata"].get("labels") or {}):
            await kube.delete(SERVICE, names.CLUSTERD_SERVICE, names.CLUSTERD_NAMESPACE)


async def _service(kube: Kube) -> Object:
    item = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": names.CLUSTERD_SERVICE,
            "namespace": names.CLUSTERD_NAMESPACE,
            "labels": {LABEL: "true"},
        },
        "spec": {"ports": [{"name": "grpc", "protocol": "TCP", "port": 8899, "targetPort": 8899}]},
    }
    try:
        return await kube.create(SERVICE, item)
    except AlreadyExists:
        return await kube.get(SERVICE, names.CLUSTERD_SERVICE, names.CLUSTERD_NAMESPACE)


def _bind(port: int, host: str, *more: str, elsewhere: bool) -> tuple[socket.socket, ...]:
    try:
        return _sockets(port, host, *more)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise Unusable(f"ClusterD can't serve on port {port}: {error.strerror}") from None
        if elsewhere:
            return _bind_free(host, *more)
        raise Unusable(
            f"port {port} of {host} is in use, perhaps by ClusterD of another cluster on this machine; end that one, "
            f"or name another place with --clusterd-addr ({FREE}: any free port), or do without: --no-clusterd"
        ) from None


def _bind_free(host: str, *more: str) -> tuple[socket.socket, ...]:
    for _ in range(TRIES):
        try:
            return _sockets(random.SystemRandom().choice(FREE_PORTS), host, *more)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise Unusable(f"ClusterD can't serve on {host}: {error.strerror}") from None
    raise Unusable(f"no port of {host} is free for ClusterD")


def _sockets(port: int, *hosts: str) -> tuple[socket.socket, ...]:
    with contextlib.ExitStack() as stack:
        found = []
        for where in dict.fromkeys(hosts):
            made = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((where, port))
            made.listen(1024)  # so that it is ours, also against others that would share it
            found.append(made)
        stack.pop_all()
        return tuple(found)


def secret_file(folder: Path) -> Path:
    """That of the cluster which has this folder."""
    return folder / KEYS / SECRET


def security(folder: Path, insecure: bool) -> Security:
    """Tokens of jobs, from a secret that is made at the first start. Plain text: nobody but this machine hears it."""
    if insecure:
        return Security(insecure=True)
    file = secret_file(folder)
    content = file.read_bytes() if file.exists() else b""
    if not content.strip():
        content = secrets.token_hex(32).encode() + b"\n"
        write_private(file, content)
    return Security(tokens=Tokens.read(content))
