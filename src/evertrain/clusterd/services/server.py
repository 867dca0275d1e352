"""ClusterD's port: all services on one address, with limits, health checks and reflection.

| | |
|---|---|
| connections | 1024, and 512 from one address; more are reset |
| calls at the same time on a connection | 64; gRPC's clients wait, or open another connection |
| messages | 4 MiB to us, 8 MiB from us |
| keep-alive | we ping after 60 s of silence and wait 5 s; clients may ping every 3 s, also without a call |
| rate | see `limits`; errors see `door` |
"""

from __future__ import annotations

import logging
import socket
from typing import Any

import grpc

from evertrain.clusterd.services import config, fault, health, job, profiling, pubfault, recover, reflection
from evertrain.clusterd.services.access import Security
from evertrain.clusterd.services.door import Door
from evertrain.clusterd.services.gate import Gate
from evertrain.clusterd.services.limits import Limits
from evertrain.clusterd.services.ports import Hub
from evertrain.wire import service

log = logging.getLogger(__name__)

GRACE = 1.0
"""Seconds that calls under way get when the server closes."""


def options(limits: Limits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.max_receive_message_length", limits.receive),
        ("grpc.max_send_message_length", limits.send),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # It refuses calls of clients that keep within the limit of streams, when many of these end at once.
        ("grpc.http.overload_protection", 0),
        # Clients ping every 3 s, and a busy machine may bring two of them closer together.
        ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ]


class Server:
    """`health.set(True)` when the hub is ready."""

    def __init__(
        self,
        hub: Hub,
        security: Security,
        limits: Limits | None = None,
        *,
        keep_alive: float = recover.KEEP_ALIVE,
    ) -> None:
        self._limits = limits or Limits()
        self._security = security
        self._servicers: list[tuple[Any, Any]] = [
            (recover.SERVICE, recover.Recover(hub, security, keep_alive=keep_alive)),
            (fault.SERVICE, fault.Fault(hub, security)),
            (job.SERVICE, job.Job(hub, security)),
            (config.SERVICE, config.Config(hub, security)),
            (pubfault.SERVICE, pubfault.PubFault(hub, security)),
            (profiling.SERVICE, profiling.TrainingDataTrace(hub, security)),
        ]
        names = frozenset(descriptor.full_name for descriptor, _ in self._servicers)
        self.health = health.Health(names)
        self._reflection = reflection.ServerReflection(
            {*names, health.SERVICE.full_name, reflection.SERVICE.full_name}
        )  # fmt: skip
        self._gate = Gate(self._limits)
        self._grpc: Any = None

    async def start(self, *places: str | socket.socket) -> int:
        """Listen at addresses (HOST:PORT), or on sockets that are bound; the port of the first, for one with port 0.

        OSError or ValueError if that can't be.
        """
        certificates = self._security.certificates
        credentials = certificates.server() if certificates is not None else None
        self._grpc = grpc.aio.server(options=options(self._limits), interceptors=[Door(self._limits)])
        servicers = [*self._servicers, (health.SERVICE, self.health), (reflection.SERVICE, self._reflection)]
        for descriptor, servicer in servicers:
            self._grpc.add_generic_rpc_handlers((service.handlers(descriptor, servicer),))
        newer = service.handlers(reflection.SERVICE, self._reflection, name=reflection.NEWER_NAME)
        self._grpc.add_generic_rpc_handlers((newer,))
        inside = f"unix-abstract:{self._gate.inside}"
        if credentials is None:
            self._grpc.add_insecure_port(inside)
        else:
            self._grpc.add_secure_port(inside, credentials)
        await self._grpc.start()
        try:
            port = await self._gate.listen(*places)
        except OSError:
            self._gate.shut()
            await self._grpc.stop(None)
            raise
        how = [
            "TLS with certificates of both sides" if certificates else "plain text",
            "tokens of jobs" if self._security.tokens else "no tokens",
        ]
        log.info("listening on %s (port %d): %s", _text(places[0]), port, ", ".join(how))
        return port

    async def close(self) -> None:
        self._gate.shut()
        self.health.set(False)
        if self._grpc is not None:
            await self._grpc.stop(GRACE)
        await self._gate.close()


def _text(place: str | socket.socket) -> str:
    return place if isinstance(place, str) else str(place.getsockname()[0])
