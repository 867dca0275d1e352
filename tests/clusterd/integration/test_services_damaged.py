"""ClusterD's services are sent whatever can be sent, and answer as documented."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping

import grpc
import pytest

from evertrain.clusterd.faults.public_check import Refused, check
from evertrain.clusterd.services.limits import Limits
from evertrain.faultcodes.table import shipped
from tests.clusterd.client import Client, client
from tests.clusterd.services import JOB, MemoryHub, serving, soon
from tests.fuzz.answers import Known, documented, is_right
from tests.fuzz.requests import Requests

KNOWN = Known(JOB, {f"node-{node}": ("0", "1") for node in range(2)})
WAITS = "/fault.Fault/GetFaultMsgSignal"
"""It makes callers wait."""


class Hub(MemoryHub):
    """Looks at public faults as ClusterD does."""

    def __init__(self) -> None:
        super().__init__()
        self.members.add(JOB)
        self.inited.add(JOB)

    async def public_fault(self, message: Mapping[str, object]) -> str:
        try:
            check(message, shipped(), lambda number: None)
        except Refused as error:
            return str(error)
        return ""


async def fuzz(count: int, seed: int) -> None:
    """Messages filled by chance, some with a few bytes changed, and bytes that never were a message."""
    source, requests = random.Random(seed), Requests(seed, (JOB,))

    async def send(caller: Client) -> None:
        method, content = requests.any()
        if method.path == WAITS:
            return
        if source.random() < 0.3:
            content = source.randbytes(source.randrange(60))
        answer, right = await caller.answer(method, content), documented(method, content, KNOWN)
        assert is_right(answer, right), f"seed {seed}: {method.path}, {content!r}: {answer!r}, not of {right}"

    async def probe(channel: grpc.aio.Channel) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await channel.unary_unary("/grpc.health.v1.Health/Check")(source.randbytes(source.randrange(20)))

    async with (
        serving(limits=Limits(calls=1_000_000), hub=Hub()) as up,
        client(up.address, JOB) as caller,
        grpc.aio.insecure_channel(up.address) as channel,
    ):
        for _ in range(0, count, 50):
            await soon(asyncio.gather(probe(channel), *(send(caller) for _ in range(50))))
        assert (await caller.health())[0] == 0


async def test_two_thousand_damaged_requests() -> None:
    await fuzz(2000, 7)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
async def test_a_hundred_thousand_damaged_requests() -> None:
    await fuzz(100_000, 8)
