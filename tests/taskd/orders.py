"""Orders to members in other processes."""

from __future__ import annotations

import uuid as uuids

from evertrain.taskd.frames import Body
from evertrain.taskd.manager import delivery
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position


async def deliver(manager: Node, who: Position, body: Body, uuid: str = "") -> None:
    """As the manager does it: again, under the same name, if no ack comes in time."""
    uuid, codes = uuid or str(uuids.uuid4()), list[int]()
    while 0 not in codes:
        assert len(codes) < delivery.TRIES, codes
        codes.append(await manager.send(who, body.encode(), uuid=uuid))
