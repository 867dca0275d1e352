"""The status of a pod as the API shows it, and back again after a restart of the node. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evertrain.embedded.node import lifecycle
from evertrain.embedded.node.lifecycle import ContainerRun, Ending, PodRun, Running, State, Terminated, Waiting
from evertrain.embedded.recorder import rfc3339
from evertrain.kube.port import Object
from evertrain.kube.times import parse_time

LOST_CODE = 137
LOST = "NodeLost"
LOST_MESSAGE = "The node went down while the pod was running"

Records = Callable[[str, int], Mapping[str, Any] | None]
"""Name of a container, number of its run → what is noted about it (see `runtime.record`); None if it has not begun."""


def build(
    pod: Object, run: PodRun, *, host_ip: str, pod_ip: str, now: float, before: Mapping[str, Any] | None = None
) -> Object:
    """`before` is the status that was written last: conditions that stay as they are keep their times."""
    before = before if before is not None else pod.get("status") or {}
    phase = lifecycle.phase(run)
    status: Object = {
        "phase": phase,
        "conditions": _conditions(run, phase, before.get("conditions") or [], now),
        "hostIP": host_ip,
        "hostIPs": [{"ip": host_ip}],
        **({"podIP": pod_ip, "podIPs": [{"ip": pod_ip}]} if pod_ip else {}),
        "startTime": rfc3339(run.start_time),
        "qosClass": before.get("qosClass") or _quality(pod.get("spec") or {}),
        "containerStatuses": [_container(pod, run, c) for c in run.containers if not c.init],
    }
    if init := [_container(pod, run, c) for c in run.containers if c.init]:
        status["initContainerStatuses"] = init
    reason, message = "", ""
    if run.ending is not None and run.ending.reason == lifecycle.DEADLINE:
        reason, message = run.ending.reason, run.ending.message
    elif run.lost and phase == "Failed":
        reason, message = LOST, run.lost
    # Explicit nulls: the status is written as a merge patch.
    status["reason"], status["message"] = reason or None, message or None
    return status


def differs(shown: Mapping[str, Any], written: Mapping[str, Any]) -> bool:
    """Does the status say something else about the pod's state than what was written?"""
    found, wanted = (
        {condition.get("type"): condition.get("status") for condition in each.get("conditions") or []}
        for each in (shown, written)
    )
    return shown.get("phase") != written.get("phase") or any(found.get(name) != value for name, value in wanted.items())


def restore(pod: Object, *, now: float, base_backoff: float, records: Records | None = None) -> PodRun:
    """The pod as its status tells. With `records` the node went down meanwhile: what the status doesn't tell yet is in
    them, and whatever ran then has ended by that."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    known = {
        entry.get("name"): entry
        for entry in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    }
    containers = [
        *(ContainerRun(container, init=True) for container in spec.get("initContainers") or []),
        *(ContainerRun(container) for container in spec.get("containers") or []),
    ]
    start = _seconds(status.get("startTime")) if status.get("startTime") else None
    deadline = spec.get("activeDeadlineSeconds")
    run = PodRun(
        containers=containers,
        restart_policy=spec.get("restartPolicy") or lifecycle.ALWAYS,
        start_time=start or now,
        deadline=None if deadline is None else float(deadline),
        base_backoff=base_backoff,
    )
    for container in containers:
        if entry := known.get(container.name):
            _restore(container, entry)
        if records is not None:
            _catch_up(run, container, records, now)
    return run


def _restore(container: ContainerRun, entry: Mapping[str, Any]) -> None:
    container.attempts = int(entry.get("restartCount") or 0)
    state, last = entry.get("state") or {}, entry.get("lastState") or {}
    if "terminated" in last:
        container.last = _terminated(last["terminated"])
    if "terminated" in state:
        container.attempts += 1
        container.state = _terminated(state["terminated"])
    elif "running" in state:
        container.attempts += 1
        container.state = Running(_seconds(state["running"].get("startedAt")))
    elif container.last is not None:
        container.attempts += 1


def _catch_up(run: PodRun, container: ContainerRun, records: Records, now: float) -> None:
    while True:
        if not isinstance(container.state, Running):
            record = records(container.name, container.attempts)
            if record is None:
                return
            if isinstance(container.state, Terminated):
                container.last = container.state
            container.attempts += 1
            container.state = Running(float(record["since"]))
        _end(run, container, container.state, records(container.name, container.attempts - 1) or {}, now)


def _end(run: PodRun, container: ContainerRun, state: Running, record: Mapping[str, Any], now: float) -> None:
    if "code" in record:
        code, signal, until = int(record["code"]), int(record["signal"]), float(record["until"])
        ended = Terminated(code, state.since, until, signal=signal)
    else:
        run.lost = LOST_MESSAGE
        ended = Terminated(LOST_CODE, state.since, now, reason=LOST, message=LOST_MESSAGE)
    lifecycle.note_exit(run, container, ended)


def finished(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def ending(pod: Object, now: float) -> Ending | None:
    """The wish that the pod be gone."""
    metadata = pod["metadata"]
    if not metadata.get("deletionTimestamp"):
        return None
    grace = metadata.get("deletionGracePeriodSeconds")
    if grace is None:
        grace = grace_period(pod)
    return Ending(lifecycle.DELETED, "", now, float(grace))


def grace_period(pod: Object) -> float:
    grace = (pod.get("spec") or {}).get("terminationGracePeriodSeconds")
    return 30.0 if grace is None else float(grace)


def _container(pod: Object, run: PodRun, container: ContainerRun) -> Object:
    image = str(container.spec.get("image") or "")
    running = isinstance(container.state, Running)
    found: Object = {
        "name": container.name,
        "image": image,
        "imageID": "",
        "ready": container.ready or _init_done(container),
        "started": running,
        "restartCount": max(0, container.attempts - 1),
        "state": _state(container.state, pod, container.name, container.attempts - 1),
        "lastState": _state(container.last, pod, container.name, container.attempts - 2) if container.last else {},
    }
    if container.attempts:
        found["containerID"] = _id(pod, container.name, container.attempts - 1)
    return found


def _init_done(container: ContainerRun) -> bool:
    state = container.state
    return container.init and not container.stays and isinstance(state, Terminated) and state.code == 0


def _id(pod: Object, name: str, attempt: int) -> str:
    return f"evertrain://{pod['metadata'].get('uid', '')}/{name}/{max(0, attempt)}"


def _state(state: State, pod: Object, name: str, attempt: int) -> Object:
    match state:
        case Waiting():
            return {"waiting": {"reason": state.reason, **({"message": state.message} if state.message else {})}}
        case Running():
            return {"running": {"startedAt": rfc3339(state.since)}}
        case Terminated():
            found: Object = {
                "exitCode": state.code,
                "reason": state.reason or ("Completed" if state.code == 0 else "Error"),
                "startedAt": rfc3339(state.since),
                "finishedAt": rfc3339(state.until),
                "containerID": _id(pod, name, attempt),
            }
            if state.signal:
                found["signal"] = state.signal
            if state.message:
                found["message"] = state.message
            return {"terminated": found}


def _terminated(entry: Mapping[str, Any]) -> Terminated:
    return Terminated(
        code=int(entry.get("exitCode") or 0),
        since=_seconds(entry.get("startedAt")),
        until=_seconds(entry.get("finishedAt")),
        signal=int(entry.get("signal") or 0),
        reason=str(entry.get("reason") or ""),
        message=str(entry.get("message") or ""),
    )


def _seconds(text: str | None) -> float:
    try:
        return parse_time(str(text)).timestamp()
    except ValueError:
        return 0.0


def _conditions(run: PodRun, phase: str, before: Sequence[Mapping[str, Any]], now: float) -> list[Object]:
    done = phase == "Succeeded"
    incomplete = [c.name for c in run.containers if c.init and not (_init_done(c) or c.stays and c.alive)]
    unready = [c.name for c in run.containers if (not c.init or c.stays) and not c.ready]
    if done:
        not_ready = ("PodCompleted", "")
    elif phase == "Failed":
        not_ready = ("PodFailed", "")
    else:
        not_ready = ("ContainersNotReady", f"containers with unready status: [{' '.join(unready)}]")
    wanted: list[tuple[str, bool, str, str]] = [("PodScheduled", True, "", "")]
    if incomplete and not done:
        message = f"containers with incomplete status: [{' '.join(incomplete)}]"
        wanted.append(("Initialized", False, "ContainersNotInitialized", message))
    else:
        wanted.append(("Initialized", True, "PodCompleted" if done else "", ""))
    ready = not unready and phase == "Running"
    for name in ("ContainersReady", "Ready"):
        wanted.append((name, ready, *(("", "") if ready else not_ready)))
    known = {condition.get("type"): condition for condition in before}
    found: list[Object] = []
    for name, value, reason, message in wanted:
        old = known.pop(name, {})
        text = "True" if value else "False"
        unchanged = old.get("status") == text and old.get("lastTransitionTime")
        condition: Object = {
            "type": name,
            "status": text,
            "lastProbeTime": None,
            "lastTransitionTime": old["lastTransitionTime"] if unchanged else rfc3339(now),
        }
        if reason:
            condition["reason"] = reason
        if message:
            condition["message"] = message
        found.append(condition)
    return [*(dict(condition) for condition in known.values()), *found]


def _quality(spec: Mapping[str, Any]) -> str:
    containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    basic = ("cpu", "memory")
    limits = [(c.get("resources") or {}).get("limits") or {} for c in containers]
    requests = [(c.get("resources") or {}).get("requests") or {} for c in containers]
    if not any(name in given for given in (*limits, *requests) for name in basic):
        return "BestEffort"
    guaranteed = all(
        name in limit and request.get(name, limit[name]) == limit[name]
        for limit, request in zip(limits, requests, strict=True)
        for name in basic
    )
    return "Guaranteed" if guaranteed else "Burstable"
