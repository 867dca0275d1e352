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
import time
from collections.abc import Sequence
from typing import Any

from evertrain.launch import args
from evertrain.launch.config import LaunchConfig
from evertrain.launch.events import EventsFile
from evertrain.launch.link import LinkError
from evertrain.launch.output import Outputs
from evertrain.launch.supervisor import INTERNAL_ERROR, Supervisor
from evertrain.mindio import control, tls
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
    token = config.token or secrets.token_hex(16)
    server = await _controller(config, token) if config.node_rank == 0 else None
    host, port = (config.master_addr, config.master_port) if server is None else server.address
    outputs = Outputs(config, loop)
    lookout = tls.Lookout.from_environment(os.environ)
    dates = DateWatch(config.tls, lookout, lambda text: outputs.say(f"warning: {text}")) if config.tls else None
    events = EventsFile(config, outputs)
    supervisor = Supervisor(config, outputs, events)
    door = ""
    if config.events and server is not None:
        door = control.write_door(config.events, f"{host}:{port}", token)
        events.tell("control", address=f"{host}:{port}")
    loop.set_exception_handler(lambda loop, context: _on_internal_error(loop, context, supervisor))
    for number in config.signals:
        loop.add_signal_handler(number, supervisor.terminate, number)
    try:
        return await supervisor.run([f"{host}:{port}"], token)
    finally:
        control.remove_door(door)
        if dates is not None:
            dates.close()
        if server is not None:
            await server.close()
        await outputs.close()
        events.close()


async def _controller(config: LaunchConfig, token: str) -> Server:
    machine = Machine(
        config.world_size,
        config.timing,
        max_restarts=config.max_restarts,
        wall_offset=time.time() - time.monotonic(),
        nnodes=config.nnodes,
        node_loss=config.node_loss,
        node_wait=config.node_wait,
        elastic=config.elastic,
    )
    host, port = ("127.0.0.1", 0) if config.nnodes == 1 else (config.master_addr, config.master_port)
    context = tls.server_context(config.tls) if config.tls else None
    server = Server(machine, token, host, port, tls=context, allow_remote=config.insecure)
    try:
        await server.start()
    except OSError as error:
        reason = f"the controller can't listen on {host}:{port}: {error.strerror}; is it an address of this node?"
        raise LinkError(reason) from None
    return server
