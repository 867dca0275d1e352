"""Reports on their way to ClusterD."""

from __future__ import annotations

import asyncio

from evertrain.taskd.manager.outbox import Outbox


async def test_whoever_ends_it_hears_how_the_report_under_way_ended() -> None:
    under_way = asyncio.Event()

    async def deliver(method: str, message: object) -> None:
        under_way.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ConnectionError("it breaks at the same moment")

    outbox = Outbox()
    outbox.put("ReportProcessFault", None)
    running = asyncio.ensure_future(outbox.run(deliver))
    await under_way.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    sending = outbox._sending
    assert sending is not None and sending.done()
    assert not sending._log_traceback, "asyncio would complain that nobody has looked"  # type: ignore[attr-defined]
