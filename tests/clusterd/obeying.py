"""What a pod runs in tests of orders: the manager of a job that pauses, does as it is told, and goes on. No training.

The file that it is given says in its first line that orders may come, and then which ones have.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from evertrain import aio
from evertrain.taskd import environment
from evertrain.taskd.manager import orders, reports
from evertrain.taskd.manager.clusterd import ClusterD
from evertrain.taskd.manager.orders import NicReply, Signal
from evertrain.taskd.manager.reports import Report

READY = "ready"


async def main(file: Path) -> None:
    def say(text: str) -> None:
        with file.open("a") as told:
            told.write(text + "\n")

    def obey(signal: Signal) -> None:
        if signal.type == orders.STOP_TRAIN:
            link.report(Report(reports.STOP_COMPLETE))
        elif signal.type == orders.CHANGE_STRATEGY:
            link.report(Report(reports.RECOVER_STATUS, strategy=signal.strategy))

    def switch(ranks: list[str], ops: list[bool], job: str) -> None:
        say(json.dumps([ranks, ops]))
        link.reply_nics(NicReply(job, True))

    link = ClusterD(
        environment.clusterd(), environment.job_id(), security=environment.security(), signal=obey, nics=switch
    )
    await link.start()
    await link.subscribed.wait()
    say(READY)
    await asyncio.Event().wait()  # until the cluster ends


if __name__ == "__main__":
    aio.run(main(Path(sys.argv[1])))
