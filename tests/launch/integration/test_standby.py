"""A second controller takes over while real processes train: killed, frozen, and lost with its node."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from evertrain import aio
from evertrain.launch import args, controllers
from evertrain.mindio import control, protocol
from evertrain.mindio.controller.host import ControllerHost
from evertrain.mindio.controller.machine import Machine
from evertrain.mindio.timing import Timing
from tests.launch.launching import TRAINER, Result, environment, finish, in_charge, read_events, start, wait_for
from tests.ports import free_port


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    path = tmp_path / "trainer.py"
    path.write_text(TRAINER)
    return path


def count(events: Path, name: str) -> int:
    return len(read_events(events, name))


def trains(events: Path, ranks: int = 2) -> bool:
    """Has every rank completed a step?"""
    return all((events.parent / f"mark-1-{rank}").exists() for rank in range(ranks))


_started: list[Any] = []


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    yield
    while _started:
        launcher = _started.pop()
        if launcher.poll() is None:
            launcher.kill()
            launcher.communicate()


def launching(*argv: object, **more: Any) -> Any:
    _started.append(start(*argv, **more))
    return _started[-1]


def pair(trainer: Path, events: Path, steps: int, *more: object) -> Any:
    folder = trainer.parent
    return launching(
        "--nproc-per-node=2", "--ft-standby=1", "--ft-bound=0.5", "--ft-warm=0", "--ft-events", events, *more,
        trainer, steps, "0.1", folder, "mark@1@*",
    )  # fmt: skip


def ended_well(result: Result, steps: int, ranks: int = 2) -> None:
    assert result.code == 0, result
    for rank in range(ranks):
        assert f"done {rank} {steps}" in result.out, result


@pytest.mark.matrix
def test_one_controller_after_the_other_is_killed_and_nobody_is_interrupted(trainer: Path, tmp_path: Path) -> None:
    events, began = tmp_path / "events.jsonl", time.monotonic()
    launcher = pair(trainer, events, 40)
    # Not before all ranks train: whoever is still out is not taken for one that does.
    wait_for(lambda: trains(events), "the beginning of the training")
    for number in (1, 2):
        in_charge(launcher.pid, events).kill()
        wait_for(lambda expected=number: count(events, "takeover") == expected, "the take-over")
        wait_for(lambda expected=number: count(events, "standby") == 1 + expected, "a new standby")
    result = finish(launcher, began, events)
    ended_well(result, 40)
    assert not result.incidents and count(events, "generation") == 1, result


def test_killed_in_the_middle_of_an_incident(trainer: Path, tmp_path: Path) -> None:
    events, began = tmp_path / "events.jsonl", time.monotonic()
    launcher = pair(trainer, events, 20)
    wait_for(lambda: trains(events), "the beginning of the training")
    rank = next(event["pid"] for event in read_events(events, "started") if event["rank"] == 1)
    victim = in_charge(launcher.pid, events)
    psutil.Process(rank).kill()
    wait_for(lambda: count(events, "fault"), "the fault")
    victim.kill()
    result = finish(launcher, began, events)
    ended_well(result, 20)
    (incident,) = result.incidents
    assert incident["id"] == "i-0001" and incident["steps_lost"] == 0, incident
    # Whichever of the two controllers had it started; if it was the one before, its incident ended with it.
    assert incident["restarted"] in ([1], [])


def test_no_controller_outlives_a_killed_launcher(trainer: Path, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    launcher = pair(trainer, events, 1000)
    wait_for(lambda: trains(events), "the beginning of the training")
    children = psutil.Process(launcher.pid).children()
    assert len(children) == 4, children
    in_charge(launcher.pid, events).suspend()  # the others would end by themselves, as the agent is gone
    launcher.kill()
    launcher.communicate()
    assert not psutil.wait_procs(children, timeout=30)[1]


def test_a_standby_that_can_not_be_started_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has a controller; it must not end because there is no second one."""

    async def scenario() -> None:
        said: list[str] = []
        config = args.parse(["--ft-standby=1", "-m", "json"], {})
        outputs: Any = SimpleNamespace(say=said.append)
        pair = await controllers._Pair.start(config, "t" * 16, outputs)
        try:
            monkeypatch.setattr(controllers, "CONTROLLER_PROCESS", "no.such.module")
            _, standby = pair._processes.values()
            standby.kill()
            async with aio.timeout(30):
                while len(said) < 2:
                    await asyncio.sleep(0.01)
        finally:
            await pair.close()
        assert said[1] == "warning: a controller could not be started: exit code 1; the job goes on without a standby"

    aio.run(scenario())


ENDING = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1))
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
print(f"127.0.0.1:{os.getpid()}", flush=True)
while True:
    signal.pause()
"""


def test_a_controller_that_crashes_is_replaced_and_one_that_ends_with_the_job_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ending_controller.py").write_text(ENDING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(controllers, "CONTROLLER_PROCESS", "ending_controller")

    async def scenario() -> None:
        said: list[str] = []
        outputs: Any = SimpleNamespace(say=said.append)
        pair = await controllers._Pair.start(args.parse(["--ft-standby=1", "-m", "json"], {}), "t" * 16, outputs)
        try:
            async with aio.timeout(30):
                (address, crashing), (other, ending) = pair._processes.items()
                crashing.send_signal(signal.SIGUSR1)
                while pair.addresses[0] != other or len(pair.addresses) < 2:
                    await asyncio.sleep(0.01)
                assert said == [f"the controller at {address} ended with code 1; another one is started"]
                ending.send_signal(signal.SIGUSR2)
                while other in pair.addresses:
                    await asyncio.sleep(0.01)
            assert len(said) == 1
        finally:
            await pair.close()
        assert len(said) == 1

    aio.run(scenario())


FAILED_JOB = """
import asyncio, sys
from evertrain.launch import controller_process

async def over():
    return 3, "the script failed"

class Host:
    address = "127.0.0.1:1"
    def __init__(self, *_, **__): self.over = over()
    async def start(self): pass
    async def close(self): pass

controller_process.ControllerHost = Host
sys.exit(controller_process.main())
"""


def test_the_code_of_a_job_that_failed_is_not_that_of_a_controller_that_crashed() -> None:
    options = {controllers.PAIR: '{"peer": ""}', "EVERTRAIN_TOKEN": "t", "EVERTRAIN_AGENT_PID": str(os.getpid())}
    assert subprocess.run([sys.executable, "-c", FAILED_JOB], env=environment(**options), timeout=120).returncode == 0


@pytest.mark.matrix
def test_a_rank_hangs_while_the_controller_is_lost(trainer: Path, tmp_path: Path) -> None:
    """It lives and does not come to the new controller; the others do not wait for it for ever."""
    events, began = tmp_path / "events.jsonl", time.monotonic()
    launcher = pair(trainer, events, 40)
    wait_for(lambda: trains(events), "the beginning of the training")
    rank = next(event["pid"] for event in read_events(events, "started") if event["rank"] == 1)
    victim = in_charge(launcher.pid, events)
    victim.suspend()  # so that it can't do anything about the rank
    psutil.Process(rank).suspend()
    victim.kill()
    result = finish(launcher, began, events)
    ended_well(result, 40)
    assert [incident["restarted"] for incident in result.incidents] == [[1]], result


def order(events: Path, *words: str) -> str:
    command = [sys.executable, "-m", "evertrain.cli.main", "ctl", f"--events={events}", "--wait=20", *words]
    result = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert result.returncode == 0, result
    return result.stdout


@pytest.mark.matrix
def test_a_pause_outlives_its_controller(trainer: Path, tmp_path: Path) -> None:
    events, began = tmp_path / "events.jsonl", time.monotonic()
    launcher = pair(trainer, events, 40)
    wait_for(lambda: trains(events), "the beginning of the training")
    order(events, "pause", "--timeout=100")
    in_charge(launcher.pid, events).kill()
    wait_for(lambda: count(events, "paused") == 2, "the pause under the new controller")
    first, second = (event["step"] for event in read_events(events, "paused"))
    assert second == first + 1
    wait_for(lambda: count(events, "control") == 2, "the address of the new controller")
    status = json.loads(order(events, "status"))
    assert (status["state"], status["paused"], status["step"]) == ("paused", True, second)
    assert "goes on" in order(events, "continue")
    result = finish(launcher, began, events)
    ended_well(result, 40)
    assert not result.incidents and count(events, "generation") == 1, result


@pytest.mark.matrix
def test_a_frozen_controller_is_replaced_and_steps_down_when_it_wakes_up(trainer: Path, tmp_path: Path) -> None:
    events, began = tmp_path / "events.jsonl", time.monotonic()
    launcher = pair(trainer, events, 150, "--ft-timing", "silence=2")
    wait_for(lambda: trains(events), "the beginning of the training")
    frozen = in_charge(launcher.pid, events)
    frozen.send_signal(signal.SIGSTOP)
    wait_for(lambda: count(events, "takeover"), "the take-over", 25)
    assert json.loads(order(events, "status"))["state"] == "running"
    frozen.send_signal(signal.SIGCONT)
    wait_for(lambda: count(events, "standby") == 2, "the old one stands by")
    result = finish(launcher, began, events)
    ended_well(result, 150)
    assert not result.incidents and count(events, "generation") == 1, result
    assert "steps down" in result.err


def node(trainer: Path, rank: int, port: int, token: str, events: Path, steps: int = 30) -> Any:
    return launching(
        "--nnodes=2", "--nproc-per-node=2", f"--node-rank={rank}", "--master-addr=127.0.0.2", f"--master-port={port}",
        f"--local-addr=127.0.0.{rank + 2}", "--ft-bound=0.5", "--ft-warm=0", "--ft-events", events,
        trainer, steps, "0.1", trainer.parent, "mark@1@*", env={"EVERTRAIN_TOKEN": token},
    )  # fmt: skip


def test_node_0_is_lost_with_the_controller(trainer: Path, tmp_path: Path) -> None:
    events, began = tmp_path / "events.jsonl", time.monotonic()
    port, token = free_port(), secrets.token_hex(16)
    nodes = [node(trainer, rank, port, token, events) for rank in (0, 1)]
    wait_for(lambda: trains(events, 4) and count(events, "standby"), "the beginning of the training")
    nodes[0].kill()
    nodes[0].communicate()
    nodes[0] = node(trainer, 0, port, token, events)
    results = [finish(each, began, events) for each in nodes]
    assert [result.code for result in results] == [0, 0], results
    assert all(f"done {rank} 30" in results[rank // 2].out for rank in range(4)), results
    (incident,) = results[0].incidents
    assert incident["restarted"] == [0, 1] and incident["steps_lost"] == 0, incident
    assert count(events, "launch") == 1, "the nodes share the file, and it is one run"


def test_a_stranger_gets_no_place(trainer: Path, tmp_path: Path) -> None:
    """A launcher with another token is refused with the reason, and the job does not notice."""
    port, token = free_port(), secrets.token_hex(16)
    began = time.monotonic()
    first = node(trainer, 0, port, token, tmp_path / "e.jsonl", 3)
    stranger = finish(node(trainer, 1, port, secrets.token_hex(16), tmp_path / "s.jsonl", 3), began)
    assert stranger.code == 70 and "wrong job token" in stranger.err, stranger
    second = node(trainer, 1, port, token, tmp_path / "e.jsonl", 3)
    assert [finish(each, began).code for each in (first, second)] == [0, 0]


def test_an_order_to_the_standby_reaches_the_controller_in_charge() -> None:
    async def scenario() -> protocol.Answer:
        hosts: list[ControllerHost] = []
        try:
            for _ in range(2):
                peer = hosts[0].address if hosts else ""
                host = ControllerHost(
                    lambda: Machine(1, Timing.derive(0.5)), "t", "127.0.0.1", 0, leads=not hosts, peer=peer
                )
                await host.start()
                hosts.append(host)
            door = control.Door(protocol.address(hosts[1].address), "t")
            command = protocol.Command(request=1, order="status")
            return await asyncio.to_thread(control.ask, door, command, 10.0)
        finally:
            for host in hosts:
                await host.close()

    answer = aio.run(scenario())
    assert answer.ok and answer.text == "idle"


AGREE = '''
import os, sys, time
import torch, torch.distributed as dist
from evertrain.torch import Training

rank, folder = int(os.environ["RANK"]), sys.argv[1]
late = "group" if rank == 1 else "collective" if rank == 2 else ""


def come_late(where):
    """The others wait for this one: in the store if it is late for the group, in gloo otherwise."""
    while late == where and not os.path.exists(os.path.join(folder, where)):
        time.sleep(0.01)


come_late("group")
open(os.path.join(folder, f"there-{rank}"), "w").close()
dist.init_process_group("gloo")
for number in range(3):
    if number == 1:
        come_late("collective")
    dist.all_reduce(total := torch.tensor([1.0 + number]))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = Training(model=model, optimizer=optimizer, seed=1)


@training.resilient
def train():
    for step, batch in training.steps([torch.ones(4, 2)] * 4, until=4):
        training.model(batch).sum().backward()
        optimizer.step()


train()
print(f"done {rank} {training.step} {total.item():g}", flush=True)
'''


@pytest.mark.matrix
@pytest.mark.parametrize("late", ["group", pytest.param("collective", marks=pytest.mark.exhaustive)])
def test_the_controller_is_lost_before_training(late: str, tmp_path: Path) -> None:
    """While ranks look for each other, or after that: nobody but them notices, and nothing that was said is lost."""
    script, events, began = tmp_path / "agree.py", tmp_path / "events.jsonl", time.monotonic()
    script.write_text(AGREE)
    launcher = launching(
        "--nproc-per-node=3", "--ft-standby=1", "--ft-bound=0.5", "--ft-warm=0", "--ft-events", events, script, tmp_path
    )  # fmt: skip
    if late == "collective":
        (tmp_path / "group").touch()
    waiting = (0, 2) if late == "group" else (0, 1)
    wait_for(lambda: all((tmp_path / f"there-{rank}").exists() for rank in waiting), "the script", 60)
    victim = in_charge(launcher.pid, events)
    (door,) = {link.laddr for link in victim.net_connections() if link.status == "LISTEN"}
    wait_for(lambda: len([x for x in victim.net_connections() if x.laddr == door]) >= 3 + len(waiting), "the links")
    victim.kill()
    wait_for(lambda: count(events, "takeover"), "the take-over")
    (tmp_path / "group").touch()
    (tmp_path / "collective").touch()
    result = finish(launcher, began, events)
    assert result.code == 0 and not result.incidents, result
    assert all(f"done {rank} 4 9" in result.out for rank in range(3)), result
