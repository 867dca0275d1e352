"""`evertrain launch`: a controller, an agent connected to it, and the way back to an exit code.

Controller and agent share this process and its loop, and still talk over a socket: the agent then works the same
with a controller elsewhere, and nothing but messages can pass between them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

from evertrain.launch import args
from evertrain.launch.config import LaunchConfig
from evertrain.launch.events import EventsFile
from evertrain.launch.link import LinkError
from evertrain.launch.output import Outputs
from evertrain.launch.supervisor import INTERNAL_ERROR, Supervisor
from evertrain.mindio import tls
from evertrain.mindio.controller.machine import Machine
from evertrain.mindio.controller.server import Server
from evertrain.mindio.tls_dates import DateWatch


def main(argv: Sequence[str] | None = None) -> int:
    config = args.parse(sys.argv[1:] if argv is None else argv)
    if config.print_config:
        print(config.describe())
        return 0
    logging.basicConfig(level=logging.ERROR, format="evertrain: %(message)s")
    try:
        return asyncio.run(launch(config))
    except LinkError as error:
        print(f"evertrain: {error}", file=sys.stderr)
        return INTERNAL_ERROR


def _on_internal_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any], supervisor: Supervisor) -> None:
    loop.default_exception_handler(context)
    if (error := context.get("exception")) is not None:
        supervisor.fail(f"{type(error).__name__}: {error}")


async def launch(config: LaunchConfig) -> int:
    """Run the job to its end; nothing of it is left when this returns."""
    loop = asyncio.get_running_loop()
    token = secrets.token_hex(16)
    machine = Machine(
        config.world_size,
        config.timing,
        max_restarts=config.max_restarts,
        wall_offset=time.time() - time.monotonic(),
    )
    context = tls.server_context(config.tls) if config.tls else None
    server = Server(machine, token, tls=context, allow_remote=config.insecure)
    await server.start()
    outputs = Outputs(config, loop)
    lookout = tls.Lookout.from_environment(os.environ)
    dates = DateWatch(config.tls, lookout, lambda text: outputs.say(f"warning: {text}")) if config.tls else None
    events = EventsFile(config, outputs)
    supervisor = Supervisor(config, outputs, events)
    loop.set_exception_handler(lambda loop, context: _on_internal_error(loop, context, supervisor))
    for number in config.signals:
        loop.add_signal_handler(number, supervisor.terminate, number)
    try:
        return await supervisor.run(server.address, token)
    finally:
        if dates is not None:
            dates.close()
        await server.close()
        await outputs.close()
        events.close()
