"""The PubFault service: faults that others than noded have found."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from evertrain.clusterd.services.access import Security
from evertrain.clusterd.services.limits import Bucket
from evertrain.clusterd.services.ports import PublicFaultPort
from evertrain.clusterd.services.replies import Code
from evertrain.wire import pubfault_pb2 as wire

SERVICE = wire.DESCRIPTOR.services_by_name["PubFault"]
RATE, BURST = 1, 100
"""Messages of one resource: a second, and at once."""


class PubFault:
    def __init__(
        self, hub: PublicFaultPort, security: Security, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._hub, self._security, self._clock = hub, security, clock
        self._buckets: dict[str, Bucket] = {}

    async def SendPublicFault(self, request: wire.PublicFaultRequest, context: Any) -> wire.RespStatus:
        await self._security.admit(context)
        if not self._may(request.resource):
            return wire.RespStatus(code=Code.RESOURCE_LIMITED, info="limiter work by resource failed")
        wrong = await self._hub.public_fault(as_json(request))
        if wrong:
            return wire.RespStatus(code=Code.BAD_REQUEST, info=f"check public fault info failed, error: {wrong}")
        return wire.RespStatus(code=Code.OK, info="public fault send successfully")

    def _may(self, resource: str) -> bool:
        """One that nobody knows has no limit of its own, and is refused for what it is."""
        if resource not in self._hub.public_fault_resources():
            return True
        return self._buckets.setdefault(resource, Bucket(RATE, BURST)).take(self._clock())


def as_json(request: wire.PublicFaultRequest) -> dict[str, object]:
    """With the keys that the ConfigMap has, too."""
    return {
        "id": request.id,
        "timestamp": request.timestamp,
        "version": request.version,
        "resource": request.resource,
        "faults": [
            {
                "faultId": fault.faultId,
                "faultType": fault.faultType,
                "faultCode": fault.faultCode,
                "faultTime": fault.faultTime,
                "assertion": fault.assertion,
                "faultLocation": dict(fault.faultLocation),
                "influence": [
                    {"nodeName": each.nodeName, "nodeSN": each.nodeSN, "deviceIds": list(each.deviceIds)}
                    for each in fault.influence
                ],
                "description": fault.description,
            }
            for fault in request.faults
        ],
    }
