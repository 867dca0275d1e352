"""A job of two pods, led by a ClusterD that follows the test's script."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from evertrain import aio
from tests.ports import free_ports
from tests.taskd.cluster import ScriptedClusterD
from tests.taskd.documents import START
from tests.taskd.e2e.test_chain import STEPS
from tests.taskd.jobs import EXAMPLE, Result, TwoPods
from tests.taskd.tap import Story, Tap

LIMIT = 300.0
"""Seconds for each thing that is waited for; it costs nothing when all is well."""


FAULT = "ReportProcessFault"
FAILED: Mapping[int, int] = {3: 1}
"""Rank 3, and with no special fault."""
_CALL = re.compile(
    r"do action [^,]+? (finish|err), .* data="
    r"ToController\(action='(.*?)', faults=(.*?), strategy='(.*?)', params='(.*?)', timeout=(\d+)\)"
)
_OURS = ("process_ended", "not_replaced")
"""Calls that ours has beyond the original's."""


def reported_ranks(request: Any) -> dict[int, int]:
    """Those that are reported, and with what fault."""
    return {int(each.rankId): int(each.faultType) for each in request.faultRanks}


class Led:
    def __init__(self, pods: TwoPods, clusterd: ScriptedClusterD, story: Story, tap: Tap) -> None:
        self.pods, self.clusterd, self.story, self.tap = pods, clusterd, story, tap

    async def begins(self, *args: str) -> None:
        for node in (0, 1):
            self.start(node, *args)
        for method in ("Init", "Register"):
            await self.expect(method)

    def start(self, node: int, *args: str, address: int = 0) -> None:
        self.pods.start(node, f"--steps={STEPS}", *args, address=address)

    async def done(self, step: int, *ranks: int) -> None:
        """Until these ranks have done a step."""
        for rank in ranks or range(4):
            await self.until(lambda file=self.pods.work / f"steps.{rank}": _has(file, step), f"step {step} of {rank}")

    async def told_to_halt(self, step: int) -> None:
        """Until all ranks know it. Who lets a job go on before, which was held up to here, may see it end instead."""
        await self.until(lambda: self.pods.halting(step) == 4, f"the order to halt at the end of step {step}")

    def go(self) -> None:
        """End what `--fault STEP:RANK:hold` has begun."""
        (self.pods.work / "go").touch()

    async def hears(self, method: str) -> tuple[str, Any]:
        """The next call, which this one is expected to be or to follow."""
        try:
            async with aio.timeout(LIMIT):
                got, request = await self.clusterd.heard.get()
        except TimeoutError:
            raise AssertionError(f"no {method}\n{self.explain()}") from None
        assert request.jobId == "job-1", f"{got} {request}"
        return got, request

    async def expect(self, method: str) -> Any:
        """The next call, apart from reports of faults that ClusterD has spoken of itself: more than one notices how the
        ranks of a pod end, and they do so one after the other."""
        while True:
            got, request = await self.hears(method)
            if got == method:
                return request
            old = got == FAULT and self.clusterd.spoken_of.issuperset(reported_ranks(request))
            assert old, f"{got} {request} instead of {method}\n{self.explain()}"

    async def stops(self, fault: Mapping[int, int], stopped: Mapping[int, int] | None = None) -> None:
        """From the report of a fault to the end of all work on steps, when it may be called another one."""
        request = await self.expect(FAULT)
        while reported_ranks(request) != fault and self.clusterd.spoken_of.issuperset(reported_ranks(request)):
            request = await self.expect(FAULT)
        assert reported_ranks(request) == fault, f"{request}\n{self.explain()}"
        self.clusterd.say("stopTrain", "stop_train", faults=fault)
        await self.stopped(fault if stopped is None else stopped)

    async def stopped(self, faults: Mapping[int, int], code: int = 0) -> None:
        request = await self.expect("ReportStopComplete")
        assert (request.status.code, reported_ranks(request)) == (code, faults), f"{request}\n{self.explain()}"

    async def offered(self, faults: Mapping[int, int]) -> list[str]:
        """Strategies, for these faults."""
        request = await self.expect("ReportRecoverStrategy")
        assert reported_ranks(request) == faults, f"{request}\n{self.explain()}"
        return list(request.strategies)

    async def succeeded(self, strategy: str) -> None:
        status = await self.expect("ReportRecoverStatus")
        assert (status.status.code, status.strategy) == (0, strategy), f"{status}\n{self.explain()}"
        assert not status.isolateRankIds, status

    async def recovers_in_place(self, reported: Mapping[int, int] = FAILED) -> None:
        """Rank 3 has ended; its process alone is replaced. The controller does not know of what it has died."""
        await self.stops(reported, FAILED)
        self.clusterd.say("globalFault", "on_global_rank", faults=FAILED)
        assert "recover" in await self.offered(FAILED)
        self.replaces_in_place()
        await self.succeeded("recover")

    def replaces_in_place(self) -> None:
        self.clusterd.say(
            "changeStrategy", "change_strategy", "fault_nodes_restart", changeStrategy="recover",
            extraParams="recover-in-place", faults=FAILED, nodeRankIds=["1"],
        )  # fmt: skip

    async def recovers_with_a_new_pod(self) -> None:
        """Rank 3 has ended; its pod is replaced, by one at another address."""
        await self.stops(FAILED)
        faults = {2: 1, 3: 1}
        self.clusterd.say("globalFault", "on_global_rank", "fault_nodes_exit", faults=faults, nodeRankIds=["1"])
        await self.exits(1)
        assert "recover" in await self.offered(faults)
        self.start(1, address=9)
        self.clusterd.say("changeStrategy", "change_strategy", changeStrategy="recover")
        await self.succeeded("recover")

    async def ends(self) -> Result:
        return await asyncio.to_thread(self.pods.wait)

    async def exits(self, node: int, code: int = 1) -> None:
        """The pod's script ends."""
        try:
            got: int | None = await asyncio.to_thread(self.pods.pods[node].wait, LIMIT)
        except subprocess.TimeoutExpired:
            got = None
        assert got == code, f"pod {node} ended with {got}\n{self.explain()}"

    async def until(self, condition: Callable[[], Any], what: str, limit: float = LIMIT) -> None:
        """For what happens inside of processes, where nobody tells us."""
        try:
            async with aio.timeout(limit):
                while not condition():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"waited too long for {what}\n{self.explain()}") from None

    async def heard(self, line: str, times: int = 1) -> None:
        try:
            await self.story.until(line, times=times)
        except TimeoutError:
            raise AssertionError(f"not heard: {line}\n{self.explain()}") from None

    def controlled(self) -> list[str]:
        """What the manager has called the controller for, in this order, and what of it was refused.

        It is no part of the story: when a call has returned the controller may have reported already.
        """
        calls = []
        for how, action, faults, strategy, params, timeout in _CALL.findall(self.pods.manager_log()):
            words = [action, strategy, params, timeout, faults, "refused" if how == "err" else ""]
            if action not in _OURS:
                calls.append(" ".join(word for word in words if word not in ("", "0", "{}")))
        return calls

    def explain(self) -> str:
        return "\n".join([*self.story.lines, *self.controlled(), self.pods.result([]).explain()])


def _has(file: Path, step: int) -> bool:
    return file.exists() and any(line.startswith(f"[{step},") for line in file.read_text().splitlines())


def start_of(node: int, restarts: int = 32767, given: int = 32767) -> list[str]:
    """What is said by and to the agent of a node until its processes run."""
    return [
        f"the path to Agent {node} leads over Proxy {node}",
        f"Agent {node} says REGISTER 0",
        f"Agent {node} says STATUS 201 {given}",
        f"Mgr orders Agent {node}: 210 {restarts}",
        f"Agent {node} confirms 210",
    ]


def end_of(node: int) -> str:
    """What the agent of a node says when its processes have ended with success."""
    return f"Agent {node} says STATUS 203 0"


AT_FAULT = 'globalFault ["fault_nodes_exit"]'
BY_STRATEGY = 'changeStrategy ["change_strategy"]'
"""Why an agent is told to exit: with the faults, or with the strategy `exit`."""


def told_to_exit(node: int, why: str = "") -> str:
    return f"Mgr orders Agent {node}: 203 {why}".rstrip()


def exit_of(node: int, why: str = "") -> list[str]:
    return [told_to_exit(node, why), f"Agent {node} confirms 203", f"Agent {node} says STATUS 202 []"]


def restart_of(node: int, restarts: int) -> list[str]:
    return [f"Mgr orders Agent {node}: 208 {restarts}", f"Agent {node} confirms 208"]


def assert_second_node_replaced(job: Led, why: str = BY_STRATEGY) -> None:
    """Its agent exits, the other one starts its processes again, and its successor is not told to exit."""
    assert job.story.agent(0) == [*start_of(0), *restart_of(0, 32766), end_of(0)]
    assert job.story.agent(1) == [*start_of(1), *exit_of(1, why), *start_of(1, 32766), end_of(1)]


def assert_controlled(job: Led, *calls: str) -> None:
    """This is what the controller was called for, and its end with the manager's.

    A controller that has said its last word may have ended before it hears of the exit.
    """
    last = "change_strategy exit"
    found = [last if call == f"{last} refused" else call for call in job.controlled()]
    assert found == [*calls, "destroy_controller"], found


@contextlib.asynccontextmanager
async def led(
    folder: Path, start: str = START, script: Path = EXAMPLE, place: Path | None = None, **environment: str | None
) -> AsyncIterator[Led]:
    story = Story()
    clusterd, tap = ScriptedClusterD(story.tell), Tap(story)
    await clusterd.start()
    front, behind = free_ports(2)
    pods = TwoPods(
        folder,
        start=start,
        script=script,
        place=place,
        manager_port=str(behind),
        TASKD_MANAGER_PORT=str(front),
        MINDX_SERVER_IP="127.0.0.1",
        MINDX_SERVER_PORT=str(clusterd.port),
        **environment,
    )
    await tap.start(f"127.0.0.2:{front}", f"127.0.0.2:{behind}")
    try:
        yield Led(pods, clusterd, story, tap)
    finally:
        pods.end()
        await tap.stop()
        await clusterd.stop()
