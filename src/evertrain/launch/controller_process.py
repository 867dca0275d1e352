"""A controller in a process of its own, one of a pair: `python -m evertrain.launch.controller_process`.

What it needs comes as JSON in EVERTRAIN_PAIR, the token in EVERTRAIN_TOKEN. It prints its address as soon as it
listens, ends with the job, and the kernel ends it with the launcher. Its exit code is 0 when the job is over, however
that ended: any other means that the job has lost it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
from typing import Any

from evertrain import aio
from evertrain.mindio import tls
from evertrain.mindio.controller.host import ControllerHost
from evertrain.mindio.controller.machine import Machine
from evertrain.mindio.timing import Timing

PAIR = "EVERTRAIN_PAIR"
_PR_SET_PDEATHSIG = 1


async def serve(options: dict[str, Any]) -> None:
    def machine() -> Machine:
        return Machine(
            options["world_size"],
            Timing(**options["timing"]),
            max_restarts=options["max_restarts"],
            restarts_asked=options["restarts_asked"],
            elastic=options["elastic"],
            wall_offset=time.time() - time.monotonic(),
        )

    certificates = tls.TlsInfo.from_environment(os.environ)
    host = ControllerHost(
        machine,
        os.environ["EVERTRAIN_TOKEN"],
        "127.0.0.1",
        0,
        leads=not options["peer"],
        peer=options["peer"],
        tls=tls.server_context(certificates) if certificates else None,
        client_tls=tls.client_context(certificates) if certificates else None,
    )
    await host.start()
    print(host.address, flush=True)
    try:
        await host.over
    finally:
        await host.close()


def main() -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(os.environ["EVERTRAIN_AGENT_PID"]):
        return 1  # the signal is only sent for a death that is still to come
    logging.basicConfig(level=logging.ERROR, format="evertrain: %(message)s")
    aio.run(serve(json.loads(os.environ[PAIR])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
