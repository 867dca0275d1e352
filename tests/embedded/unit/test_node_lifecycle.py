"""What a node does next with a pod, and how its status says so."""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.embedded.node import lifecycle, status
from evertrain.embedded.node.lifecycle import (
    ContainerRun,
    Ending,
    Finish,
    Kill,
    PodRun,
    Running,
    Start,
    Stop,
    Terminated,
    Waiting,
    next_steps,
    note_backoff,
    note_exit,
    phase,
)

Object = dict[str, Any]


def one(policy: str = "Never", *states: lifecycle.State, init: int = 0, **more: Any) -> PodRun:
    containers = [
        ContainerRun({"name": f"c{i}"}, init=i < init, state=state) for i, state in enumerate(states or (Waiting(),))
    ]
    return PodRun(containers, policy, start_time=0.0, **more)


def ended(code: int, until: float = 10.0) -> Terminated:
    return Terminated(code, 0.0, until)


def steps(run: PodRun, now: float = 10.0, grace: float = 30.0) -> list[lifecycle.Step]:
    return next_steps(run, grace, now).steps


@pytest.mark.parametrize(
    ("policy", "states", "expected"),
    [
        ("Never", [Waiting()], "Pending"),
        ("Never", [Running(0), Waiting()], "Pending"),
        ("Never", [Running(0), Running(0)], "Running"),
        ("Never", [Running(0), ended(1)], "Running"),
        ("Never", [ended(0), ended(0)], "Succeeded"),
        ("Never", [ended(0), ended(1)], "Failed"),
        ("OnFailure", [ended(0), ended(0)], "Succeeded"),
        ("OnFailure", [ended(0), ended(1)], "Running"),
        ("Always", [ended(0)], "Running"),
    ],
)
def test_phase(policy: str, states: list[lifecycle.State], expected: str) -> None:
    assert phase(one(policy, *states)) == expected


def test_a_pod_starts_and_finishes() -> None:
    assert steps(one("Never", Waiting(), Waiting())) == [Start("c0"), Start("c1")]
    assert steps(one("Never", Running(0), ended(1))) == []
    assert steps(one("Never", ended(0), ended(1))) == [Finish()]


def test_init_containers_go_one_after_the_other() -> None:
    assert steps(one("Never", Waiting(), Waiting(), Waiting(), init=2)) == [Start("c0")]
    assert steps(one("Never", Running(0), Waiting(), Waiting(), init=2)) == []
    assert steps(one("Never", ended(0), Waiting(), Waiting(), init=2)) == [Start("c1")]
    assert steps(one("Never", ended(0), ended(0), Waiting(), init=2)) == [Start("c2")]
    failed = one("Never", ended(1), Waiting(), init=1)
    assert steps(failed) == [Finish()]
    assert phase(failed) == "Failed"
    assert phase(one("Always", ended(1), Waiting(), init=1)) == "Pending"
    assert phase(one("Always", ended(0), Running(0), init=1)) == "Running"


def test_a_sidecar_runs_beside_and_ends_with_the_others() -> None:
    run = one("Never", Waiting(), Waiting(), init=1)
    run.containers[0].spec = {"name": "c0", "restartPolicy": "Always"}
    assert steps(run) == [Start("c0")]
    run.containers[0].state = Running(0)
    assert steps(run) == [Start("c1")]
    run.containers[1].state = ended(0)
    assert steps(run) == [Stop("c0")]
    assert phase(run) == "Succeeded"


def test_backoff_grows_and_is_forgotten_after_a_long_run() -> None:
    run = one("Always", Running(0))
    container = run.containers[0]
    delays = []
    for number in range(8):
        note_exit(run, container, Terminated(1, number, number))
        delays.append(container.not_before - number)
        container.state = Running(0)
    assert delays == [0, 10, 20, 40, 80, 160, 300, 300]
    note_exit(run, container, Terminated(1, 0, 600))
    assert container.not_before == 600


def test_a_waiting_restart_is_a_crash_loop() -> None:
    run = one("Always", Running(0))
    container = run.containers[0]
    container.backoff = 40.0
    note_exit(run, container, ended(1, until=100))
    note_backoff(run, container, "p_default(u)", now=101)
    assert container.state == Waiting(
        "CrashLoopBackOff", "back-off 40s restarting failed container=c0 pod=p_default(u)"
    )
    assert container.last == ended(1, until=100)
    plan = next_steps(run, 30, 101)
    assert (plan.steps, plan.wake) == ([], 140)
    assert steps(run, now=140) == [Start("c0")]
    assert phase(run) == "Running"


def test_an_end_is_asked_for_and_then_enforced() -> None:
    run = one("Always", Running(0), ended(1))
    run.ending = Ending(lifecycle.DELETED, "", since=10, grace=5)
    plan = next_steps(run, 30, 10)
    assert (plan.steps, plan.wake) == ([Stop("c0")], 15)
    run.containers[0].stop_asked = 10
    assert steps(run, 12) == []
    assert steps(run, 15) == [Kill("c0")]
    run.containers[0].killed = True
    assert steps(run, 16) == []
    note_exit(run, run.containers[0], ended(137))
    assert steps(run, 16) == [Finish()]
    assert phase(run) == "Failed"


def test_a_pod_that_is_deleted_before_it_ran_has_failed() -> None:
    run = one("Always", Waiting())
    run.ending = Ending(lifecycle.DELETED, "", since=10, grace=30)
    assert steps(run) == [Finish()]
    assert phase(run) == "Failed"


def test_a_deadline() -> None:
    run = one("Always", Running(0), deadline=60.0)
    assert next_steps(run, 5, 10).wake == 60
    assert next_steps(run, 5, 60).steps == [Stop("c0")]
    assert run.ending is not None and run.ending.reason == "DeadlineExceeded"
    note_exit(run, run.containers[0], ended(0))
    assert phase(run) == "Failed"
    over = one("Never", ended(0), deadline=60.0)
    assert steps(over, 100) == [Finish()]
    assert phase(over) == "Succeeded"


def test_an_unhealthy_container_is_ended_and_started_again() -> None:
    run = one("Always", Running(0))
    run.containers[0].unhealthy = "Unhealthy"
    assert steps(run) == [Stop("c0")]
    run.containers[0].stop_asked = 10
    assert steps(run, 40) == [Kill("c0")]
    note_exit(run, run.containers[0], ended(137, 41))
    assert steps(run, 41) == [Start("c0")]


def pod(**state: Any) -> Object:
    return {
        "metadata": {"name": "p", "namespace": "default", "uid": "u", **state.pop("metadata", {})},
        "spec": {"restartPolicy": state.pop("policy", "Never"), "containers": [{"name": "c0", "image": "i"}]},
        "status": state,
    }


def build(run: PodRun, item: Object | None = None, now: float = 100.0) -> Object:
    return status.build(item or pod(), run, host_ip="127.64.0.1", pod_ip="127.64.0.2", now=now)


def conditions(built: Object) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c.get("reason", "")) for c in built["conditions"]}


def test_the_status_of_a_running_pod() -> None:
    run = one("Never", Running(50))
    run.containers[0].ready = True
    run.containers[0].attempts = 1
    built = build(run)
    assert built["phase"] == "Running"
    assert built["podIPs"] == [{"ip": "127.64.0.2"}]
    assert built["containerStatuses"][0]["state"] == {"running": {"startedAt": "1970-01-01T00:00:50Z"}}
    assert set(conditions(built).values()) == {("True", "")}


def test_conditions_keep_the_time_of_their_last_change() -> None:
    run = one("Never", Waiting())
    first = build(run, now=100)
    again = status.build(pod(), run, host_ip="", pod_ip="", now=200, before=first)
    assert again["conditions"] == first["conditions"]
    run.containers[0].state = Running(200)
    run.containers[0].ready = True
    later = status.build(pod(), run, host_ip="", pod_ip="", now=200, before=first)
    times = {c["type"]: c["lastTransitionTime"] for c in later["conditions"]}
    assert times["Ready"] == "1970-01-01T00:03:20Z"
    assert times["PodScheduled"] == "1970-01-01T00:01:40Z"


def test_conditions_of_others_stay() -> None:
    foreign = {"type": "Mine", "status": "True"}
    assert build(one(), pod(conditions=[foreign]))["conditions"][0] == foreign


def test_the_status_of_a_finished_pod() -> None:
    run = one("Never", Terminated(137, 1, 2, signal=9))
    run.containers[0].attempts = 1
    built = build(run)
    assert built["phase"] == "Failed"
    assert built["containerStatuses"][0]["state"]["terminated"] == {
        "exitCode": 137,
        "signal": 9,
        "reason": "Error",
        "startedAt": "1970-01-01T00:00:01Z",
        "finishedAt": "1970-01-01T00:00:02Z",
        "containerID": "evertrain://u/c0/0",
    }
    assert conditions(build(one("Never", ended(0))))["Ready"] == ("False", "PodCompleted")
    assert conditions(build(one("Never", Waiting())))["Ready"] == ("False", "ContainersNotReady")


@pytest.mark.parametrize("state", [Waiting("CrashLoopBackOff", "m"), Running(5), Terminated(3, 5, 6, reason="Error")])
def test_a_status_is_read_back(state: lifecycle.State) -> None:
    run = one("Always", state)
    run.containers[0].attempts = 3
    run.containers[0].last = Terminated(1, 2, 3, reason="Error")
    again = status.restore(pod(policy="Always", **build(run)), now=100, base_backoff=10)
    assert again.containers[0].attempts == 3
    assert again.containers[0].last == Terminated(1, 2, 3, reason="Error")
    assert isinstance(again.containers[0].state, type(state))


@pytest.mark.parametrize(
    ("policy", "expected", "next_step"), [("Never", "Failed", Finish()), ("Always", "Running", Start("c0"))]
)
def test_what_ran_when_the_node_went_down_is_lost(policy: str, expected: str, next_step: lifecycle.Step) -> None:
    run = one(policy, Running(5))
    run.containers[0].attempts = 1
    again = status.restore(pod(policy=policy, **build(run)), now=100, base_backoff=10, records=lambda *_: None)
    assert phase(again) == expected
    built = build(again)
    assert built["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137
    assert built["reason"] == ("NodeLost" if expected == "Failed" else None)
    assert steps(again, now=100) == [next_step]


BEGUN = {"since": 5.0}
DONE = {"since": 5.0, "until": 6.0, "code": 0, "signal": 0}
BAD = {"since": 5.0, "until": 6.0, "code": 3, "signal": 0}


@pytest.mark.parametrize(
    ("policy", "told", "records", "attempts", "expected"),
    [
        ("Never", Waiting(), [], 0, "Pending"),
        ("Never", Waiting(), [BEGUN], 1, "Failed"),
        ("Never", Waiting(), [DONE], 1, "Succeeded"),
        ("Never", Running(5), [DONE], 1, "Succeeded"),
        ("OnFailure", Running(5), [DONE], 1, "Succeeded"),
        ("OnFailure", Running(5), [BAD, DONE], 2, "Succeeded"),
        ("OnFailure", Terminated(3, 5, 6), [BAD, BEGUN], 2, "Running"),
        ("Always", Waiting(), [BAD, BAD, DONE], 3, "Running"),
    ],
)
def test_what_the_node_could_not_tell_any_more_is_known_from_its_records(
    policy: str, told: lifecycle.State, records: list[Object], attempts: int, expected: str
) -> None:
    """Killed between an event and its report: nothing is run a second time, and no end is lost."""
    run = one(policy, told)
    run.containers[0].attempts = 0 if isinstance(told, Waiting) else 1

    def record(_: str, attempt: int) -> Object | None:
        return records[attempt] if attempt < len(records) else None

    again = status.restore(pod(policy=policy, **build(run)), now=100, base_backoff=10, records=record)
    assert again.containers[0].attempts == attempts
    assert phase(again) == expected
    if policy == "Never" and records:
        assert steps(again, now=100) == [Finish()]


def test_the_wish_for_the_end() -> None:
    assert status.ending(pod(), 5) is None
    deleted = pod(metadata={"deletionTimestamp": "t", "deletionGracePeriodSeconds": 7})
    assert status.ending(deleted, 5) == Ending("Deleted", "", 5, 7.0)
    assert status.ending(pod(metadata={"deletionTimestamp": "t"}), 5) == Ending("Deleted", "", 5, 30.0)


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, "BestEffort"),
        ({"limits": {"huawei.com/Ascend910": 1}}, "BestEffort"),
        ({"requests": {"cpu": "1"}}, "Burstable"),
        ({"limits": {"cpu": "1", "memory": "1Gi"}}, "Guaranteed"),
        ({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}}, "Burstable"),
    ],
)
def test_quality_of_service(resources: Object, expected: str) -> None:
    item = pod()
    item["spec"]["containers"][0]["resources"] = resources
    assert build(one(), item)["qosClass"] == expected
