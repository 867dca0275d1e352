"""Where the controllers of a job are: in this launcher, in the launchers of other nodes, or in processes of their own.

On one node the controller is in the launcher, and both live and die together; with a standby there are two processes,
and one that ends is replaced, to stand by for the other. On several nodes the launcher of node 0
hosts the controller in charge, at an address that all know, and that of node 1 a standby; they may change roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

from evertrain import aio
from evertrain.launch import nodes
from evertrain.launch.config import LaunchConfig
from evertrain.launch.events import EventsFile
from evertrain.launch.link import LinkError
from evertrain.launch.output import Outputs
from evertrain.mindio import tls
from evertrain.mindio.controller.machine import Machine
from evertrain.mindio.controller.server import Server

CONTROLLER_PROCESS = "evertrain.launch.controller_process"
PAIR = "EVERTRAIN_PAIR"
_PATIENCE = 2.0


class Controllers(Protocol):
    """What this launcher has to do with the job's controllers."""

    @property
    def addresses(self) -> list[str]:
        """Where the agent begins to look for the one in charge."""

    async def close(self) -> None: ...


async def start(
    config: LaunchConfig, token: str, outputs: Outputs, events: EventsFile, on_lead: Callable[[str], None]
) -> Controllers:
    """Raises LinkError if there can be no controller here although there has to be one. `on_lead` gets the address of
    a controller that is in charge here, now or later; of two on one node the agent knows later which one it is."""
    if config.nnodes == 1 and config.standby:
        pair = await _Pair.start(config, token, outputs)
        on_lead(pair.addresses[0])
        return pair
    if config.nnodes == 1:
        inside = await _Inside.start(config, token)
        on_lead(inside.addresses[0])
        return inside
    if config.node_rank > int(config.standby):
        return _Elsewhere(config)
    return await _Hosted.start(config, token, outputs, events, on_lead)


def _machine(config: LaunchConfig) -> Machine:
    return Machine(
        config.world_size,
        config.timing,
        max_restarts=config.max_restarts,
        restarts_asked=config.restarts_asked,
        wall_offset=time.time() - time.monotonic(),
        nnodes=config.nnodes,
        node_loss=config.node_loss,
        least_nodes=config.least_nodes,
        node_wait=config.node_wait,
        elastic=config.elastic,
    )


def _master(config: LaunchConfig) -> str:
    return f"{config.master_addr}:{config.master_port}"


class _Inside:
    """The controller of a job on one node."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @classmethod
    async def start(cls, config: LaunchConfig, token: str) -> _Inside:
        context = tls.server_context(config.tls) if config.tls else None
        server = Server(_machine(config), token, tls=context, allow_remote=config.insecure)
        await server.start()
        return cls(server)

    @property
    def addresses(self) -> list[str]:
        host, port = self._server.address
        return [f"{host}:{port}"]

    async def close(self) -> None:
        await self._server.close()


class HostsController(Protocol):
    async def close(self) -> None: ...


class _Pair:
    """Two controllers on one node, in processes of their own."""

    def __init__(self, config: LaunchConfig, token: str, outputs: Outputs) -> None:
        self._config, self._outputs = config, outputs
        self._environment = {
            **os.environ,
            **(config.tls.environment() if config.tls else {}),
            "EVERTRAIN_TOKEN": token,
            "EVERTRAIN_AGENT_PID": str(os.getpid()),
        }
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._closing = False

    @classmethod
    async def start(cls, config: LaunchConfig, token: str, outputs: Outputs) -> _Pair:
        pair = cls(config, token, outputs)
        await pair._add(await pair._add(""))
        return pair

    @property
    def addresses(self) -> list[str]:
        return list(self._processes)

    async def _add(self, peer: str) -> str:
        config = self._config
        options = {
            "world_size": config.world_size,
            "timing": dataclasses.asdict(config.timing),
            "max_restarts": config.max_restarts,
            "restarts_asked": config.restarts_asked,
            "elastic": config.elastic,
            "peer": peer,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", CONTROLLER_PROCESS, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={**self._environment, PAIR: json.dumps(options)},
        )  # fmt: skip
        assert process.stdout is not None
        try:
            async with aio.timeout(config.timing.start):
                address = (await process.stdout.readline()).decode().strip()
        except TimeoutError:
            address = ""
            process.kill()
        if address and self._closing:
            address = ""
            process.kill()
        if not address:
            raise LinkError(f"a controller could not be started: exit code {await process.wait()}")
        self._processes[address] = process
        chore = asyncio.create_task(self._replace(address, process))
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)
        return address

    async def _replace(self, address: str, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        del self._processes[address]
        if self._closing or code == 0 or not self._processes:
            return  # it ended with the job
        (other,) = self._processes
        how = "was killed" if code < 0 else f"ended with code {code}"
        self._outputs.say(f"the controller at {address} {how}; another one is started")
        try:
            await self._add(other)
        except (LinkError, OSError) as error:
            if not self._closing:
                self._outputs.say(f"warning: {error}; the job goes on without a standby")

    async def close(self) -> None:
        """They end with the job; whoever does not is killed."""
        self._closing = True
        chores = list(self._chores)
        if chores:
            await asyncio.wait(chores, timeout=_PATIENCE)
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*self._chores, return_exceptions=True)


class _Elsewhere:
    """Other nodes have them."""

    def __init__(self, config: LaunchConfig) -> None:
        self.addresses = [_master(config)]

    async def close(self) -> None:
        pass


class _Hosted:
    """This launcher has one of them: node 0 begins in charge, node 1 as the standby."""

    def __init__(self, config: LaunchConfig, host: HostsController) -> None:
        self._host = host
        self.addresses = [_master(config)]

    @classmethod
    async def start(
        cls, config: LaunchConfig, token: str, outputs: Outputs, events: EventsFile, on_lead: Callable[[str], None]
    ) -> _Hosted:
        # Not needed on one node, where every millisecond of the start counts.
        from evertrain.mindio.controller.host import ControllerHost

        leads = config.node_rank == 0

        def on_role(leads: bool) -> None:
            events.active = leads or config.events_everywhere
            events.continues = True
            outputs.say("this node's controller takes over" if leads else "this node's controller stands by")

        try:
            address, port = config.master_addr, config.master_port
            if not leads:
                address, port = config.local_addr or nodes.address_towards(address, port), 0
            host = ControllerHost(
                lambda: _machine(config),
                token,
                address,
                port,
                leads=leads,
                peer="" if leads else _master(config),
                tls=tls.server_context(config.tls) if config.tls else None,
                client_tls=tls.client_context(config.tls) if config.tls else None,
                allow_remote=config.insecure,
                on_role=on_role,
                on_lead=on_lead,
            )
            await host.start()
        except OSError as error:
            where, reason = f"{address}:{port}", error.strerror or str(error)
            advice = "is it an address of this node?"
            raise LinkError(f"the controller can't listen on {where}: {reason}; {advice}") from None
        except ValueError as error:
            raise LinkError(str(error)) from None
        return cls(config, host)

    async def close(self) -> None:
        await self._host.close()
