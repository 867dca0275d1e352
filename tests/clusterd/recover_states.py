"""A way into every state of a recovery, with the state that it leads to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from evertrain.clusterd.model import MEMORY, OTHER, Pod
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover.events import (
    NicsSwitched,
    ProcessFault,
    Status,
    StopComplete,
    Strategies,
    StressTest,
    SwitchNics,
)
from tests.clusterd.recover_world import World

OFFERS = ("retry", "recover", "downgrade", "upgrade", "dump", "exit")
STATES: dict[str, Callable[[], World]] = {}


def leads_to(state: str) -> Callable[[Callable[[], World]], Callable[[], World]]:
    def register(build: Callable[[], World]) -> Callable[[], World]:
        STATES[state] = build
        return build

    return register


@leads_to(n.INIT)
def idle() -> World:
    return World("recover")


@leads_to(n.FLUSHING)
def flushing() -> World:
    world = World("recover", annotations={"ProcessRecoverStrategy": ""})
    world.say(ProcessFault({3: OTHER}))
    world.see(pods={rank: replace(pod, phase="Pending") for rank, pod in world.job.pods.items()})
    return world


@leads_to(n.STOPPING)
def stopping() -> World:
    world = World("recover", listening=False)
    world.say(ProcessFault({3: OTHER}))
    return world


@leads_to(n.STOPPED)
def stopped(strategies: str = "recover,dump", kind: str = OTHER) -> World:
    world = World(strategies)
    world.say(ProcessFault({3: kind}))
    return world


@leads_to(n.GLOBAL_FAULT)
def mending() -> World:
    world = World("recover-in-place")
    world.hit(world.fault(3, level="RestartBusiness", in_place=True))
    world.say(StopComplete(0))
    return world


@leads_to(n.OFFERS)
def told(strategies: str = "recover,dump", kind: str = OTHER) -> World:
    world = stopped(strategies, kind)
    world.say(StopComplete(0))
    return world


def offered(strategies: str, kind: str = OTHER) -> World:
    world = told(strategies, kind)
    world.say(Strategies(OFFERS))
    return world


@leads_to(n.DECIDED)
def decided() -> World:
    world = World("elastic-training,dump", labels={"pod-rescheduling": "on"})
    world.say(ProcessFault({3: OTHER}))
    world.say(StopComplete(0))
    world.say(Strategies(OFFERS))
    return world


@leads_to(n.RETRY_STATUS)
def retried() -> World:
    return offered("retry,recover,dump", MEMORY)


@leads_to(n.RECOVER_STATUS)
def recovering() -> World:
    world = offered("recover,dump")
    world.replace(1)
    return world


@leads_to(n.DUMP_STATUS)
def dumping() -> World:
    return stopped("dump")


@leads_to(n.RESCHEDULING)
def restarting() -> World:
    return offered("exit")


@leads_to(n.FAULT_RETRY)
def rescheduling() -> World:
    world = stopped()
    world.wait()
    return world


@leads_to(n.KILL_JOB)
def killing() -> World:
    world = stopped()
    world.say(StopComplete(404))
    return world


@leads_to(n.SCALE_IN_RANKS)
def shrinking() -> World:
    return offered("elastic-training,dump")


@leads_to(n.SCALE_IN_STATUS)
def isolated() -> World:
    world = shrinking()
    world.say(Status(201, "downgrade", isolate=(2, 3)))
    return world


@leads_to(n.SCALED)
def scaled() -> World:
    world = isolated()
    world.say(Status(0, "downgrade"))
    return world


@leads_to(n.SCALE_OUT_STATUS)
def growing() -> World:
    world = scaled()
    world.replace(1)
    return world


@leads_to(n.PAUSING)
def pausing() -> World:
    world = World("recover,dump")
    world.say(SwitchNics({2: True, 3: False}))
    return world


@leads_to(n.SWITCHING_NICS)
def switching_nics() -> World:
    world = pausing()
    world.say(StopComplete(0))
    return world


@leads_to(n.CONTINUING)
def continuing() -> World:
    world = switching_nics()
    world.say(NicsSwitched(True))
    return world


@leads_to(n.STRESSING)
def stressing() -> World:
    world = World("recover,dump")
    world.say(StressTest({2: (0, 1), 3: (0, 1)}))
    world.say(StopComplete(0))
    return world


@leads_to(n.NEW_POD)
def hot_switch() -> World:
    world = World("recover", labels={"subHealthyStrategy": "hotSwitch"})
    world.sicken(3)
    return world


@leads_to(n.HOT_PAUSE)
def backed_up() -> World:
    world = hot_switch()
    run_backup(world)
    return world


@leads_to(n.OLD_POD)
def paused_for_switch() -> World:
    world = backed_up()
    world.say(Strategies(("migration",)))
    return world


@leads_to(n.MIGRATING)
def migrating() -> World:
    world = paused_for_switch()
    promote(world)
    return world


@leads_to(n.STOP_JOB)
def stopping_job() -> World:
    world = backed_up()
    world.say(Strategies(("exit",)))
    return world


def run_backup(world: World, phase: str = "Running") -> None:
    backup = Pod(1, "backup-uid", "train-1-hot-0001", "spare-1", phase=phase)
    world.see(backups={"train-1": backup})


def promote(world: World) -> None:
    """The old pod is gone, and the operator has made the backup the pod."""
    pods = {**world.job.pods, 1: replace(world.job.backups["train-1"], devices=world.job.pods[1].devices)}
    world.see(pods=pods, backups={})
