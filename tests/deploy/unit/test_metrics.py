"""Each figure that the parts show to Prometheus, and the port at which they do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from evertrain import aio
from evertrain.clusterd.metrics import Figures as ClusterDFigures
from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import Note
from evertrain.clusterd.resched.shell import RESCHEDULED, START_AGAIN
from evertrain.clusterd.services.access import Security
from evertrain.clusterd.shell import ClusterD
from evertrain.kube import daemon
from evertrain.kube.client import Client
from evertrain.kube.metrics import Tally, gauge, histogram, page
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, ApiError, NotFound
from evertrain.noded.daemon import NodeDaemon
from evertrain.noded.faults import ChipFault, NodeFault
from evertrain.noded.metrics import Figures as NodeFigures
from evertrain.noded.sources import Sources
from evertrain.operator.carry import Again
from evertrain.operator.metrics import Figures as OperatorFigures
from evertrain.operator.shell import Operator
from tests.clusterd.unit.test_timeline import RECOVERY
from tests.kube.fake import FakeKube
from tests.operator.acjobs import ascend_job
from tests.ports import free_ports

ANSWERS = Counter({("GET", "200"): 7})


def samples(metrics: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    """By name and values of labels, after a trip through the text, as whoever reads it sees them."""
    text = page(lambda: metrics)().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


# The text.


def test_a_tally_counts_what_is_within_each_bound() -> None:
    tally = Tally(0.1, 1)
    for seconds in (0.05, 0.1, 0.5, 3):
        tally.add(seconds)
    assert tally.buckets() == [("0.1", 2), ("1", 3), ("+Inf", 4)]
    found = samples([histogram("x_seconds", "x", tally)])
    assert found["x_seconds_count",] == 4 and found["x_seconds_sum",] == pytest.approx(3.65)
    assert [found["x_seconds_bucket", bound] for bound in ("0.1", "1", "+Inf")] == [2, 3, 4]


def test_the_process_is_measured_and_several_pages_do_not_collide() -> None:
    first, second = (page(lambda value=value: [gauge("x", "x", value)]) for value in (1, 2))  # type: ignore[misc]
    assert b"\nx 1.0\n" in first() and b"\nx 2.0\n" in second()
    for name in (b"process_cpu_seconds_total", b"process_resident_memory_bytes", b"process_open_fds"):
        assert b"\n" + name + b" " in first()


# The port.


async def ask(port: int, line: bytes) -> tuple[str, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(line + b"\r\nHost: x\r\n\r\n")
    head, _, body = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
    writer.close()
    first, *rest = head.decode().split("\r\n")
    return first, dict(each.split(": ") for each in rest), body


def options(port: int) -> Any:
    return SimpleNamespace(enable_healthz=True, healthz_host="127.0.0.1", healthz_address=port)


async def test_metrics_are_beside_the_health_which_stays_what_it_was() -> None:
    (port,), healthy = free_ports(1), True
    metrics = page(lambda: [gauge("x", "x", 1)])
    async with daemon.health(options(port), lambda: healthy, metrics):
        for line in (b"GET /metrics HTTP/1.1", b"GET /metrics?a=b HTTP/1.1"):
            first, headers, body = await ask(port, line)
            assert first == "HTTP/1.1 200 OK" and b"\nx 1.0\n" in body
            assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert int(headers["Content-Length"]) == len(body)
        for line in (b"GET / HTTP/1.1", b"GET /metricsx HTTP/1.1", b"HEAD / HTTP/1.1", b"nonsense"):
            assert await ask(port, line) == (
                "HTTP/1.1 200 OK", {"Content-Length": "0", "Connection": "close"}, b"",
            )  # fmt: skip
        healthy = False
        assert (await ask(port, b"GET / HTTP/1.1"))[0] == "HTTP/1.1 503 Service Unavailable"
        assert (await ask(port, b"GET /metrics HTTP/1.1"))[0] == "HTTP/1.1 200 OK", "who is ill is measured"


async def test_figures_that_cannot_be_had_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> bytes:
        raise RuntimeError("no figures")

    (port,) = free_ports(1)
    async with daemon.health(options(port), lambda: True, broken):
        assert (await ask(port, b"GET /metrics HTTP/1.1"))[0] == "HTTP/1.1 500 Internal Server Error"
        assert (await ask(port, b"GET / HTTP/1.1"))[0] == "HTTP/1.1 200 OK"
    assert "no figures" in caplog.text


# Requests.


async def test_requests_are_counted_by_what_came_of_them() -> None:
    answers: list[Any] = [httpx.Response(200, json={}), httpx.Response(404, json={}), httpx.ConnectError("no route")]

    async def request(*_: Any, **__: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    client = Client.__new__(Client)
    client._http, client.answers = SimpleNamespace(request=request), Counter()
    await client.get(ASCEND_JOB, "x", "y")
    with pytest.raises(NotFound):
        await client.get(ASCEND_JOB, "x", "y")
    with pytest.raises(ConnectionError):
        await client.delete(ASCEND_JOB, "x", "y")
    assert client.answers == {("GET", "200"): 1, ("GET", "404"): 1, ("DELETE", "none"): 1}


# The operator.


async def test_jobs_by_state_the_queue_and_who_leads() -> None:
    kube = FakeKube()
    operator = Operator(kube)
    figures = OperatorFigures(operator, ANSWERS)
    states = {"a": ["Created", "Running"], "b": ["Created", "Running"], "c": ["Failed"], "d": [], "e": ["Odd"]}
    for name, conditions in states.items():
        await kube.create(ASCEND_JOB, ascend_job(name))
        kube.set_status(ASCEND_JOB, name, {"conditions": [{"type": each} for each in conditions]})
    await operator.observer.jobs.refresh()
    operator._queue.add(("default", "a"))
    found = samples(figures.collect(True))
    jobs = {key[1]: value for key, value in found.items() if key[0] == "evertrain_operator_jobs"}
    assert jobs == {"New": 1, "Created": 0, "Running": 2, "Restarting": 0, "Succeeded": 0, "Failed": 1, "other": 1}
    assert found["evertrain_operator_queue_length",] == 1
    assert found["evertrain_operator_leads",] == 1
    assert found["evertrain_api_requests_total", "GET", "200"] == 7
    assert samples(figures.collect(False))["evertrain_operator_leads",] == 0


async def test_looks_and_what_was_in_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator(FakeKube())
    figures = OperatorFigures(operator, {})
    ends: list[Exception | None] = [None, Again("x"), ApiError(500, "", ""), TimeoutError(), KeyError("a defect")]
    done = asyncio.Event()

    async def look(key: object) -> None:
        if not ends:
            done.set()
            await asyncio.sleep(3600)
        if (end := ends.pop(0)) is not None:
            raise end
        operator._queue.add(("default", "again"))

    monkeypatch.setattr(operator, "look", look)
    operator._queue.add(("default", "job"))
    working = asyncio.ensure_future(operator._work())
    await asyncio.wait_for(done.wait(), 30)
    working.cancel()
    found = samples(figures.collect(True))
    errors = {key[1]: value for key, value in found.items() if key[0] == "evertrain_operator_reconcile_errors_total"}
    assert errors == {"unfinished": 1, "api": 2, "defect": 1}
    assert found["evertrain_operator_reconcile_seconds_count",] == 5
    assert 0 < found["evertrain_operator_reconcile_seconds_sum",] < 30


# ClusterD.


def recovery(timeline: Any, uid: str, **changes: str) -> None:
    for at, note in RECOVERY:
        details = {**note.details, "id": uid}
        if note.kind == "closed":
            details |= changes
        timeline.note(Job(uid=uid, name=uid, namespace="team"), Note(note.kind, note.text, details), 1000 + at / 1000)


async def test_recoveries_by_decision_outcome_and_phase() -> None:
    clusterd = ClusterD(FakeKube(), [], Security(insecure=True))
    figures = ClusterDFigures({})
    figures.follow(clusterd)
    before = samples(figures.collect(True))
    assert before["evertrain_clusterd_recoveries_total", "recover", "failed"] == 0, "it is there before it happens"
    recovery(clusterd.timeline, "a")
    recovery(clusterd.timeline, "b", outcome="failed")
    recovery(clusterd.timeline, "c", outcome="something new", strategy="as well")
    job = Job(uid="d", name="d", namespace="team")
    clusterd.timeline.note(job, Note("opened", "rank 3 failed", {"id": "d"}), 2000.0)
    open_now = samples(figures.collect(True))
    clusterd.timeline.forget("d", 2003.0)
    job = Job(uid="e", name="e", namespace="team")
    clusterd.timeline.note(job, Note("opened", "a chip is broken"), 3000.0)
    clusterd.timeline.note(job, Note("phase", "", {"phase": START_AGAIN}), 3000.0)
    clusterd.timeline.note(job, Note("closed", "all pods run again", {"outcome": RESCHEDULED, "ok": True}), 3005.0)
    found = samples(figures.collect(False))
    await clusterd.timeline.close()

    name = "evertrain_clusterd_recoveries_total"
    ended = {key[1:]: value for key, value in found.items() if key[0] == name and value}
    assert ended == {
        ("recover", "recovered"): 1, ("recover", "failed"): 1, ("other", "other"): 1, ("none", "job gone"): 1,
        ("none", "rescheduled"): 1,
    }  # fmt: skip
    assert found["evertrain_clusterd_recovery_seconds_count", "recover"] == 1, "only those that succeeded"
    assert found["evertrain_clusterd_recovery_seconds_sum", "recover"] == pytest.approx(0.72)
    assert found["evertrain_clusterd_recovery_phase_seconds_count", "stop"] == 6
    assert found["evertrain_clusterd_recovery_phase_seconds_sum", "stop"] == pytest.approx(3 * 0.148)
    assert found["evertrain_clusterd_recovery_phase_seconds_sum", "detect"] == pytest.approx(3 * 0.04 + 3)
    assert found["evertrain_clusterd_recovery_phase_seconds_sum", "start again"] == 5
    assert open_now["evertrain_clusterd_open_incidents",] == 1
    assert found["evertrain_clusterd_open_incidents",] == 0
    assert (open_now["evertrain_clusterd_leads",], found["evertrain_clusterd_leads",]) == (1, 0)


async def test_faults_in_force_and_registered_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    clusterd = ClusterD(FakeKube(), [], Security(insecure=True))
    figures = ClusterDFigures({})
    figures.follow(clusterd)
    assert samples(figures.collect(True))["evertrain_clusterd_registered_jobs",] == 0
    monkeypatch.setattr(clusterd.hub, "_recoveries", {"a": 1, "b": 2})
    level = lambda *levels: SimpleNamespace(faults=[SimpleNamespace(level=each) for each in levels])  # noqa: E731
    clusterd.faults._result = SimpleNamespace(  # type: ignore[assignment]
        devices={"n1": level("RestartNPU", "RestartNPU"), "n2": level("NotHandleFault"), "n3": level()},
        switches={"n1": level("RestartNPU")},
        nodes={"n1": level("SeparateFault")},
    )
    found = samples(figures.collect(True))
    assert found["evertrain_clusterd_registered_jobs",] == 2
    assert {key[1:]: value for key, value in found.items() if key[0] == "evertrain_clusterd_faults"} == {
        ("chip", "RestartNPU"): 2,
        ("chip", "NotHandleFault"): 1,
        ("switch", "RestartNPU"): 1,
        ("node", "SeparateFault"): 1,
    }


# noded.


class Failing:
    """Tells of two faults, then fails."""

    name = "failing"

    async def run(self, tell: Any) -> None:
        tell([ChipFault(code="80E01801", chip=0, since_ms=1, level="RestartNPU"),
              NodeFault(code="00000001", device="CPU", since_ms=1, level="SeparateFault")])  # fmt: skip
        raise RuntimeError("a defect of the detector")


async def test_faults_publishing_and_detectors_of_a_node() -> None:
    kube = FakeKube()
    refused = iter(range(2))

    def before(verb: str, kind: object, name: str) -> None:
        if verb in ("patch", "create") and kind == CONFIG_MAP and next(refused, None) is not None:
            raise ApiError(503, "ServiceUnavailable", "away")

    kube.before = before
    sources = Sources(kube, "node-0")
    node = NodeDaemon(kube, "node-0", sources, detectors=[Failing()], gap=0.01)
    figures = NodeFigures(node, {})
    quiet = samples(figures.collect())
    assert quiet["evertrain_noded_detector_failures_total", "failing"] == 0
    assert quiet["evertrain_noded_publish_errors_total", "nodeinfo"] == 0
    assert ("evertrain_noded_last_publish_timestamp_seconds", "nodeinfo") not in quiet
    running = asyncio.gather(sources.run(), node.run())
    try:
        async with aio.timeout(60):
            while node.info.written is None:
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    found = samples(figures.collect())
    assert found["evertrain_noded_faults", "chip", "RestartNPU"] == 1
    assert found["evertrain_noded_faults", "node", "SeparateFault"] == 1
    assert found["evertrain_noded_publish_errors_total", "nodeinfo"] == 2
    assert found["evertrain_noded_publish_errors_total", "deviceinfo"] == 0
    assert found["evertrain_noded_last_publish_timestamp_seconds", "nodeinfo"] == pytest.approx(node.info.written)
    assert found["evertrain_noded_detector_failures_total", "failing"] >= 1
