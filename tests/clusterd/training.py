"""What a pod runs in tests of the embedded cluster: the manager of a job that has a fault, without any training."""

from __future__ import annotations

import asyncio
import os
import sys

from evertrain import aio
from evertrain.taskd import environment
from evertrain.taskd.manager.clusterd import ClusterD
from evertrain.taskd.manager.orders import Signal
from evertrain.wire import recover_pb2 as wire

PATIENCE = 120.0


async def main() -> None:
    signals: asyncio.Queue[Signal] = asyncio.Queue()
    job, security = environment.job_id(), environment.security()
    assert bool(security.token) != ("--insecure" in sys.argv), "the pod has a token if one is asked for"
    link = ClusterD(environment.clusterd(), job, security=security, signal=signals.put_nowait)
    await link.start()

    async def hears(kind: str) -> Signal:
        while (signal := await asyncio.wait_for(signals.get(), PATIENCE)).type != kind:
            print("heard", signal.type, flush=True)
        print("heard", signal.type, signal.strategy, flush=True)
        return signal

    async def says(method: str, message: object) -> None:
        status = await link._call(method, message)
        assert status.code == 0, status

    try:
        await asyncio.wait_for(link.subscribed.wait(), PATIENCE)
        ranks = [wire.FaultRank(rankId="1", faultType="2")]
        await says("ReportProcessFault", wire.ProcessFaultRequest(jobId=job, faultRanks=ranks))
        await hears("stopTrain")
        await says("ReportStopComplete", wire.StopCompleteRequest(jobId=job))
        await hears("globalFault")
        await says("ReportRecoverStrategy", wire.RecoverStrategyRequest(jobId=job, strategies=["retry"]))
        assert (await hears("changeStrategy")).strategy == "retry"
        await says("ReportRecoverStatus", wire.RecoverStatusRequest(jobId=job, strategy="retry"))
    finally:
        await link.close()


if os.environ["RANK"] == "0":
    aio.run(main())
