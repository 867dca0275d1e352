"""The features that can be shown: which example, what is done to it, and what must be true in the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from evertrain.cli import running
from evertrain.cli.demo.evidence import Evidence, Verdict

if TYPE_CHECKING:
    from evertrain.cli.demo.play import Play

DEFAULT = "in-place"
NO_SPARES = {"TASKD_WARM_SPARES": "0"}
"""Where no process is replaced in its pod, spares would only slow the start down."""
BROKEN_CHIP = "A8028801"
CHECKPOINT_EVERY = 10
"""Steps, in the examples that have checkpoints."""
SUPER_POD = {"accelerator-type": "module-a3-16-super-pod"}


@dataclass(frozen=True)
class Feature:
    name: str
    title: str
    example: str
    """Below examples/resumable."""
    disturb: Callable[[Play], Awaitable[None]]
    """When some steps are done."""
    judge: Callable[[Evidence], Iterable[Verdict]]
    """When the job has ended."""
    nodes: int = 3
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the nodes."""
    node_grace: float = 40.0
    """Seconds until the cluster gives up a silent node."""
    steps: int = 60
    faults: Callable[[int], Iterable[str]] = lambda steps: ()
    """What the training script does to itself, given its number of steps: STEP:RANK:KIND."""
    arguments: tuple[str, ...] = ()
    """Of the training script, besides."""
    environment: Mapping[str, str] = field(default_factory=lambda: NO_SPARES)
    """Of the job's pods."""
    waits: tuple[float, ...] = (0.5,)
    """At these parts of its steps training waits until it has been disturbed, so that it isn't over before."""
    incidents: int = 1
    """That ClusterD records, at least."""
    loss_within: float | None = None
    """Weights need not be the same bits, but the loss of each step must not differ by more."""


# --- process-level rescheduling


async def kill_a_process_with_a_spare(play: Play) -> None:
    await play.until_spare_is_warm("worker")
    play.kill(3)


def judge_in_place(seen: Evidence) -> Iterable[Verdict]:
    yield seen.decided("recover-in-place")
    yield seen.kept_pods()
    yield seen.restarted(3)
    yield seen.did_again(0)


async def break_a_chip(play: Play) -> None:
    await play.order("inject", "chip", BROKEN_CHIP, "--node", play.node_of("worker"), "--chip", "0")


def judge_rescheduling(seen: Evidence) -> Iterable[Verdict]:
    yield seen.decided("recover")
    yield seen.moved("worker")
    yield seen.restarted(2, 3)
    yield seen.did_again(0)


# --- process-level online recovery


async def cut_connections(play: Play) -> None:
    """After the recovery from the fault of memory. Where that is not allowed, the training script has its own fault."""
    await play.until_halfway()
    await play.until_recovered(1)
    if play.cut((0, 1), (2, 3)):
        play.call_off("network")


def judge_online(seen: Evidence) -> Iterable[Verdict]:
    yield seen.decided("retry", times=2)
    yield seen.kept_pods()
    yield seen.restarted()
    yield seen.did_again(0)


# --- hot switching


async def make_a_node_unwell(play: Play) -> None:
    await play.order("inject", "sub-health", "--node", play.node_of("worker"), "--chip", "0")
    await play.until_ready_to_join(2, 3)


def judge_hot_switching(seen: Evidence) -> Iterable[Verdict]:
    yield seen.decided("hotSwitch")
    yield seen.halted_in("delete pod", "migrate")
    yield seen.moved("worker")
    yield seen.restarted(2, 3)
    yield seen.did_again(0)


# --- link failover


async def move_to_the_other_link(play: Play) -> None:
    await play.see_links()
    await play.order("switch-nic", play.name, "--op", "true")
    await play.see_links()
    await play.order("switch-nic", play.name, "--op", "false")
    await play.see_links()


def judge_links(seen: Evidence) -> Iterable[Verdict]:
    yield seen.obeyed(2)
    yield seen.used_links("primary", "backup", "primary")
    yield seen.kept_pods()
    yield seen.restarted()
    yield seen.did_again(0)


# --- elastic training


async def lose_a_node_for_a_while(play: Play) -> None:
    node = play.node_of("worker")
    await play.order("node", "stop", node)
    await play.until_trained_by(2)
    await play.order("node", "start", node)
    await play.until_trained_by(4)


def judge_elastic(seen: Evidence) -> Iterable[Verdict]:
    yield seen.decided("elastic-training")
    yield seen.restarted(2, 3)
    yield seen.did_again(0)


# --- dying gasp


async def kill_a_process(play: Play) -> None:
    play.kill(3)


def judge_dying_gasp(seen: Evidence) -> Iterable[Verdict]:
    yield seen.decided("dump")
    yield seen.saved_one_checkpoint()
    yield seen.restarted(0, 1, 2, 3)
    yield seen.did_again(1)


# --- several strategies


async def let_it_train(play: Play) -> None:
    """The training script has been told what is to happen."""


def judge_fallback(seen: Evidence) -> Iterable[Verdict]:
    yield seen.fell_back("retry", "recover-in-place", "recover", "dump")
    yield from judge_dying_gasp(seen)


# --- online stress test


async def stress_the_chips(play: Play) -> None:
    await play.order("stress-test", play.name, "--node", play.node_of("master"))
    await play.order("stress-test", play.name, "--node", play.node_of("worker"), code=running.FAILED)


def judge_stress_test(seen: Evidence) -> Iterable[Verdict]:
    yield seen.obeyed(2)
    yield seen.decided("recover")
    yield seen.moved("worker")
    yield seen.restarted(2, 3)
    yield seen.did_again(0)


# --- pod-level and job-level rescheduling


def judge_pod_level(seen: Evidence) -> Iterable[Verdict]:
    yield seen.decided("pod-rescheduling")
    yield seen.moved("worker")
    yield seen.restarted(0, 1, 2, 3)
    yield seen.did_again(CHECKPOINT_EVERY)


def judge_job_level(seen: Evidence) -> Iterable[Verdict]:
    yield seen.decided("job-rescheduling")
    yield seen.replaced_all("worker")
    yield seen.restarted(0, 1, 2, 3)
    yield seen.did_again(CHECKPOINT_EVERY)


FEATURES = {
    feature.name: feature
    for feature in (
        Feature(
            "in-place",
            "a process is killed; it alone is restarted, in its pod",
            "process-rescheduling/recover-in-place.yaml",
            kill_a_process_with_a_spare,
            judge_in_place,
            environment={},
        ),
        Feature(
            "process-rescheduling",
            "a chip breaks; its pod moves to a healthy node, the other processes stay",
            "process-rescheduling/recover.yaml",
            break_a_chip,
            judge_rescheduling,
        ),
        Feature(
            "online-recovery",
            "a memory fault, then a network fault; the step is run again, nobody restarts",
            "online-recovery/job.yaml",
            cut_connections,
            judge_online,
            nodes=2,
            faults=lambda steps: (f"{steps // 3}:3:uce", f"{steps * 2 // 3}:1:network"),
            incidents=2,
        ),
        Feature(
            "hot-switching",
            "a node is unwell; its pod is exchanged while training goes on",
            "hot-switching/job.yaml",
            make_a_node_unwell,
            judge_hot_switching,
            faults=lambda steps: (f"{steps // 3}:0:slow",),  # it trains on while the backup gets ready
            waits=(0.6,),  # enough is left for the switch
        ),
        Feature(
            "link-failover",
            "on an order all traffic goes over the other network link, and back",
            "link-failover/job.yaml",
            move_to_the_other_link,
            judge_links,
            nodes=2,
            labels=SUPER_POD,
            steps=100,
            faults=lambda steps: (f"{steps // 4}:0:slow",),  # there is time to look
            waits=(),  # it has to come to the end of a step to be paused
            incidents=2,
        ),
        Feature(
            "elastic-training",
            "a node is gone and there is no other; training goes on smaller, and grows again",
            "elastic-training/job.yaml",
            lose_a_node_for_a_while,
            judge_elastic,
            nodes=2,
            node_grace=5.0,
            waits=(0.5, 0.8),  # a wait ends when the training is stopped: there may be one in each size
            environment={**NO_SPARES, "MINDIO_WAIT_MINDX_TIME": "15"},
            loss_within=1e-4,
        ),
        Feature(
            "dying-gasp",
            "a process is killed; the others save a checkpoint, and all start again from it",
            "dying-gasp/job.yaml",
            kill_a_process,
            judge_dying_gasp,
        ),
        Feature(
            "fallback",
            "a rank can't be repaired, nor replaced; each strategy falls back to the next one",
            "fallback/job.yaml",
            let_it_train,
            judge_fallback,
            faults=lambda steps: (f"{steps // 2}:3:broken",),
            waits=(),
        ),
        Feature(
            "stress-test",
            "chips are tested while training pauses; a node that fails is isolated, its pod replaced",
            "stress-test/job.yaml",
            stress_the_chips,
            judge_stress_test,
            steps=80,
            faults=lambda steps: (f"{steps // 4}:0:slow",),  # it is not over before the second order
            waits=(),  # it has to come to the end of a step to be paused
            arguments=("--faulty-chip=3",),
            environment=NO_SPARES | {"TASKD_STRESS_SECONDS": "1"},
            incidents=2,
        ),
        Feature(
            "pod-rescheduling",
            "a chip breaks; its pod is replaced, and all processes go on from the last checkpoint",
            "rescheduling/pod-level.yaml",
            break_a_chip,
            judge_pod_level,
        ),
        Feature(
            "job-rescheduling",
            "a chip breaks; all pods are replaced, and go on from the last checkpoint",
            "rescheduling/job-level.yaml",
            break_a_chip,
            judge_job_level,
        ),
    )
}
