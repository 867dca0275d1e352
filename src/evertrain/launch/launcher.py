"""`evertrain launch`: a controller, an agent connected to it, and the way back to an exit code.

Controller and agent share this process and its loop, and still talk over a socket: the agent works the same with a
controller elsewhere, and nothing but messages can pass between them. On several nodes the launcher of node 0 hosts the
controller, and every launcher is the agent of its node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from evertrain import aio
from evertrain.launch import args, controllers
from evertrain.launch.config import LaunchConfig
from evertrain.launch.events import EventsFile
from evertrain.launch.link import LinkError
from evertrain.launch.output import Outputs
from evertrain.launch.processes import forget_outer_job
from evertrain.launch.supervisor import INTERNAL_ERROR, Supervisor
from evertrain.mindio import control, tls
from evertrain.mindio.control import Door
from evertrain.mindio.tls_dates import DateWatch


def main(argv: Sequence[str] | None = None) -> int:
    forget_outer_job(os.environ)
    config = args.parse(sys.argv[1:] if argv is None else argv)
    if config.print_config:
        print(config.describe())
        return 0
    logging.basicConfig(level=logging.ERROR, format="evertrain: %(message)s")
    try:
        return aio.run(launch(config))
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
    token = config.token or secrets.token_hex(16)
    outputs = Outputs(config, loop)
    lookout = tls.Lookout.from_environment(os.environ)
    dates = DateWatch(config.tls, lookout, lambda text: outputs.say(f"warning: {text}")) if config.tls else None
    events = EventsFile(config, outputs)
    door = ""
    controller = None

    def on_lead(address: str) -> None:
        """A controller is in charge here: let people talk to it."""
        nonlocal door
        if config.events:
            try:
                door = control.write_door(config.events, Door(control.parse_address(address), token, config.tls))
            except OSError as error:
                where = config.events + control.SUFFIX
                outputs.say(f"warning: `evertrain ctl` can't find this job: {where}: {error.strerror}")
            events.tell("control", address=address)

    try:
        controller = await controllers.start(config, token, outputs, events, on_lead)
        # On several nodes a controller says itself that it is in charge, on its own node.
        supervisor = Supervisor(config, outputs, events, *([on_lead] if config.nnodes == 1 else []))
        loop.set_exception_handler(lambda loop, context: _on_internal_error(loop, context, supervisor))
        for number in config.signals:
            loop.add_signal_handler(number, supervisor.terminate, number)
        return await supervisor.run(controller.addresses, token)
    finally:
        control.remove_door(door)
        if dates is not None:
            dates.close()
        if controller is not None:
            await controller.close()
        await outputs.close()
        events.close()
