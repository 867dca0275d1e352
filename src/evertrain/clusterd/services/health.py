"""grpc.health.v1: whether this ClusterD serves. One that stands by for another does not."""

from __future__ import annotations

from typing import Any

import grpc

from evertrain.clusterd.services.publisher import Everyone
from evertrain.clusterd.services.streams import pour
from evertrain.wire import health_pb2 as wire

SERVICE = wire.DESCRIPTOR.services_by_name["Health"]
_Status = wire.HealthCheckResponse.ServingStatus


class Health:
    """Needs no token: it tells nothing else."""

    def __init__(self, services: frozenset[str]) -> None:
        self._services = services | {""}
        self._serving = False
        self._watchers: Everyone[bool] = Everyone(key=lambda serving: "")

    def set(self, serving: bool) -> None:
        if serving != self._serving:
            self._serving = serving
            self._watchers.publish(serving)

    async def Check(self, request: wire.HealthCheckRequest, context: Any) -> wire.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return _response(_as_status(self._serving))

    async def Watch(self, request: wire.HealthCheckRequest, context: Any) -> None:
        known = request.service in self._services
        await pour(
            context,
            self._watchers.subscribe([self._serving]),
            lambda serving: _response(_as_status(serving) if known else _Status.SERVICE_UNKNOWN),
        )


def _as_status(serving: bool) -> Any:
    return _Status.SERVING if serving else _Status.NOT_SERVING


def _response(status: Any) -> wire.HealthCheckResponse:
    return wire.HealthCheckResponse(status=status)
