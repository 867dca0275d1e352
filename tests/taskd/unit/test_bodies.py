"""Bodies of TaskNet as the original's look: each frame that the reference writes out, beside what our parts say."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from evertrain.taskd import frames
from evertrain.taskd.agent.common import Reporter
from evertrain.taskd.frames import Body
from evertrain.taskd.manager.decide import Decisions
from evertrain.taskd.manager.orders import Order, ToAgent, ToWorker
from evertrain.taskd.tracing import KINDS
from evertrain.taskd.worker import operations
from evertrain.taskd.worker.worker import Worker
from tests.taskd.unit.test_decide import AGENTS, job, signal

OURS = {frames.REPLACED, frames.PROCESS_ENDS, frames.MAX_RESTARTS, frames.FAULT_TYPES}
"""What agents say beyond the original's, in the extension of 202. No more than this."""


def frame(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    assert list(found) == ["msg_type", "code", "message", "extension"]
    return found


def on_wire(body: Body) -> dict[str, Any]:
    return frame(body.encode())


# The manager's orders.


def exit_order(mind: Decisions) -> list[Order]:
    return mind.signal(signal("globalFault", "on_global_rank", "fault_nodes_exit", faults={9: 1}, nodes=(1,)))


def in_place(mind: Decisions) -> list[Order]:
    return mind.signal(
        signal(
            "changeStrategy", "change_strategy", "fault_nodes_restart", strategy="recover", extra="recover-in-place",
            faults={9: 1}, nodes=(1,),
        )
    )  # fmt: skip


def timings(default: bool, communication: bool) -> Callable[[Decisions], list[Order]]:
    """Orders that switch to this, from something else."""

    def wanted(default: bool, communication: bool) -> dict[str, str]:
        named = {"Step": default or communication, "CommunicationOperator": communication}
        return {kind: "on" if named.get(kind) else "off" for kind in KINDS}

    def order(mind: Decisions) -> list[Order]:
        mind.profile(wanted(not default, False), 0.0)
        return mind.profile(wanted(default, communication), 1.0)

    return order


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (lambda mind: mind.heard(AGENTS[1], frames.body("STATUS", 201, "32767", {}), 0.0),
         r'{"msg_type":"ACTION","code":210,"message":"32767","extension":null}'),
        (lambda mind: mind.signal(signal("preExitProcess", "pre exit process", faults={8: 1, 9: 1}, nodes=(1,))),
         r'{"msg_type":"ACTION","code":213,"message":"[\"8\",\"9\"]","extension":null}'),
        (in_place, r'{"msg_type":"ACTION","code":209,"message":"[\"9\"]","extension":null}'),
        (exit_order,
         r'{"msg_type":"ACTION","code":203,"message":"",'
         r'"extension":{"SignalType":"globalFault","Actions":"[\"fault_nodes_exit\"]"}}'),
        (lambda mind: mind.signal(signal("changeStrategy", "change_strategy", strategy="exit")),
         r'{"msg_type":"ACTION","code":208,"message":"32766","extension":null}'),
        (lambda mind: mind.switch_nics("U3", "job-1", ["0", "8"], [True, True], 0.0),
         r'{"msg_type":"ACTION","code":204,"message":"",'
         r'"extension":{"globalRankIDs":"[\"0\",\"8\"]","globalOps":"[true,true]","switchNicUUID":"U3"}}'),
        (lambda mind: mind.stress_test("U4", "job-1", {3: [0, 1]}, 0.0),
         r'{"msg_type":"ACTION","code":205,"message":"",'
         r'"extension":{"StressTestRankOPStr":"{\"3\":{\"ops\":[0,1]}}","stressTestUUID":"U4"}}'),
        (timings(False, False), r'{"msg_type":"ACTION","code":700,"message":"","extension":null}'),
        (timings(True, False), r'{"msg_type":"ACTION","code":710,"message":"","extension":null}'),
        (timings(True, True), r'{"msg_type":"ACTION","code":711,"message":"","extension":null}'),
    ],
    ids=["210", "213", "209", "203", "208", "204", "205", "700", "710", "711"],
)  # fmt: skip
def test_of_the_manager(order: Callable[[Decisions], list[Order]], text: str) -> None:
    told = [each.body for each in order(job()) if isinstance(each, (ToAgent, ToWorker))]
    assert told and all(on_wire(body) == frame(text) for body in told), told


# What workers say.


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Worker, list[Body]]]:
    """It can do everything, and nobody needs to listen."""
    monkeypatch.setattr(operations, "_switch_nic", lambda ranks, ops: 8 not in ranks)
    monkeypatch.setattr(operations, "stress", lambda framework, op: (0, "OK"))
    monkeypatch.setattr(operations, "paused", lambda: contextlib.nullcontext(1.0))
    made, said = Worker(0, 0, "pt", 5000), list[Body]()
    monkeypatch.setattr(made._member, "wait_joined", lambda limit: True)
    monkeypatch.setattr(made._member, "send", lambda *args: (said.append(frames.body(*args)), True)[1])
    monkeypatch.setattr(made._profiler, "_mark", lambda wanted: None)
    yield made, said
    made._profiler.switch(False, False)
    made.close()


def test_the_registration_of_a_worker(worker: tuple[Worker, list[Body]]) -> None:
    made, said = worker
    assert made._register()
    assert [on_wire(body) for body in said] == [
        frame('{"msg_type":"REGISTER","code":101,"message":"","extension":null}')
    ]


@pytest.mark.parametrize(
    ("code", "extension", "text"),
    [
        (204, {"globalRankIDs": '["0"]', "globalOps": "[true]", "switchNicUUID": "U3"},
         r'{"msg_type":"ACTION","code":204,"message":"switchOK","extension":{"switchNicUUID":"U3"}}'),
        (204, {"globalRankIDs": '["8"]', "globalOps": "[true]", "switchNicUUID": "U3"},
         r'{"msg_type":"ACTION","code":204,"message":"switchFail","extension":{"switchNicUUID":"U3"}}'),
        (205, {"StressTestRankOPStr": '{"0":{"ops":[0]}}', "stressTestUUID": "U4"},
         r'{"msg_type":"ACTION","code":205,'
         r'"message":"{\"rankResult\":{\"0\":{\"code\":\"0\",\"result\":\"OK\"}}}","extension":{"stressTestUUID":"U4"}}'),
        (700, None, r'{"msg_type":"STATUS","code":1400,"message":"","extension":null}'),
        (710, None, r'{"msg_type":"STATUS","code":1410,"message":"","extension":null}'),
        (711, None, r'{"msg_type":"STATUS","code":1411,"message":"","extension":null}'),
    ],
    ids=["204", "204 in vain", "205", "1400", "1410", "1411"],
)  # fmt: skip
def test_what_a_worker_answers(
    worker: tuple[Worker, list[Body]], code: int, extension: dict[str, str] | None, text: str
) -> None:
    made, said = worker
    made._obey(frames.body("ACTION", code, "", extension), 1e12)
    *alive, answer = (on_wire(body) for body in said)
    sign = frame('{"msg_type":"KEEP_ALIVE","code":0,"message":"","extension":null}')
    assert alive == ([sign] if code == 205 else []), "a sign of life while it tests"
    expected = frame(text)
    if code == 205:
        answer["message"], expected["message"] = json.loads(answer["message"]), json.loads(expected["message"])
    assert answer == expected


# What agents say.


@pytest.fixture
def reporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Reporter, list[Body]]]:
    made, said = Reporter("1", "127.0.0.1:1", lambda: None), list[Body]()

    async def deliver(body: Body, tries: int = 3) -> bool:
        said.append(body)
        return True

    for name, value in (("start", lambda: None), ("wait_joined", lambda limit: True), ("deliver", deliver)):
        monkeypatch.setattr(made.member, name, value)
    yield made, said
    made.close()


def test_the_registration_of_an_agent(reporter: tuple[Reporter, list[Body]]) -> None:
    made, said = reporter
    made.start()
    assert on_wire(said[0]) == frame('{"msg_type":"REGISTER","code":0,"message":"","extension":{}}')


def test_what_an_agent_reports(reporter: tuple[Reporter, list[Body]]) -> None:
    made, said = reporter
    made.faults([9])
    report = on_wire(said.pop())
    time = report["extension"].pop("REPORT_FAULT_TIME")
    assert time.isdigit() and set(report["extension"]) <= OURS
    assert json.loads(report["message"]) == {"fault_ranks": [9], "restart_times": -1}
    assert (report["msg_type"], report["code"]) == ("STATUS", 202)
    made.leaves()
    farewell = on_wire(said.pop())
    assert json.loads(farewell.pop("message")) == {"fault_ranks": [], "restart_times": -1}
    assert farewell == {"msg_type": "STATUS", "code": 202, "extension": {}}
    sign = on_wire(made._sign())
    assert json.loads(sign["message"]) == {"fault_ranks": [], "restart_times": -1}
    assert (sign["msg_type"], sign["code"]) == ("KEEP_ALIVE", 0)
    made.starts(32767)
    text = '{"msg_type":"STATUS","code":201,"message":"32767","extension":{}}'
    assert on_wire(said.pop()) == frame(text) and not said
