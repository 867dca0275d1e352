"""The whole operator with its watches, on an API in memory that is not kind to it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from evertrain import aio
from evertrain.kube.lease import Leader, LostLeadership
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, LEASE, POD, POD_GROUP, ApiError, Conflict, Kind, Kube
from evertrain.operator import __main__ as command
from evertrain.operator.shell import Operator
from tests import virtual_time
from tests.kube.fake import FakeKube
from tests.operator.acjobs import ascend_job, chips_annotation

NOWHERE = Path("/nonexistent")


@contextlib.asynccontextmanager
async def operator(kube: FakeKube) -> AsyncIterator[Operator]:
    running = Operator(kube, rank_tables=NOWHERE)
    task = asyncio.ensure_future(running.run())
    try:
        await asyncio.wait_for(running.ready.wait(), 10)
        yield running
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def states(kube: FakeKube) -> dict[str, str]:
    found = {}
    for job in kube.items(ASCEND_JOB):
        conditions = (job.get("status") or {}).get("conditions") or [{"type": ""}]
        found[job["metadata"]["name"]] = conditions[-1]["type"]
    return found


async def until(kube: FakeKube, wanted: str, seconds: float = 20.0) -> None:
    async with aio.timeout(seconds):
        while set(states(kube).values()) != {wanted}:
            await asyncio.sleep(0.005)


async def nodes(kube: FakeKube) -> None:
    """Lets groups in and pods run."""
    while True:
        for group in kube.items(POD_GROUP):
            if not group.get("status"):
                kube.set_status(POD_GROUP, group["metadata"]["name"], {"phase": "Running"})
        for pod in kube.items(POD):
            phase = pod["status"]["phase"]
            if phase in ("Pending", "Running"):
                kube.set_status(
                    POD, pod["metadata"]["name"], {"phase": "Running" if phase == "Pending" else "Succeeded"}
                )
        await asyncio.sleep(0.01)


async def vandal(kube: FakeKube) -> None:
    """Cuts watches, and sometimes the server forgets."""
    chance = random.Random(3)
    while True:
        if chance.random() < 0.3:
            kube.forget_history()
        kube.cut_watches()
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def alongside(*tasks: asyncio.Task[None]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_many_jobs_with_watches_cut_all_the_time() -> None:
    async def test() -> None:
        kube = FakeKube()
        async with operator(kube), alongside(asyncio.create_task(nodes(kube)), asyncio.create_task(vandal(kube))):
            for number in range(20):
                await kube.create(ASCEND_JOB, ascend_job(f"job-{number}", workers=3))
            await until(kube, "Succeeded")
        assert len(kube.items(POD)) == 80
        created = [name for verb, kind, name in kube.calls if (verb, kind) == ("create", "Pod")]
        assert len(created) == len(set(created))

    aio.run(test())


def test_operators_that_come_and_go() -> None:
    async def test() -> None:
        kube = FakeKube()
        for number in range(10):
            await kube.create(ASCEND_JOB, ascend_job(f"job-{number}", workers=3))
        async with alongside(asyncio.create_task(nodes(kube))):
            for lived in (0.01, 0.02, 0.03, 0.05):
                async with operator(kube):
                    await asyncio.sleep(lived)
            async with operator(kube):
                await until(kube, "Succeeded")
        created = [name for verb, kind, name in kube.calls if (verb, kind) == ("create", "Pod")]
        assert len(created) == len(set(created)) == 40

    aio.run(test())


def test_thirty_pods_deleted_at_once() -> None:
    async def test() -> None:
        kube = FakeKube()
        async with operator(kube):
            await kube.create(ASCEND_JOB, ascend_job("big", workers=31))
            async with aio.timeout(10):
                while not kube.items(POD_GROUP):
                    await asyncio.sleep(0.001)
                kube.set_status(POD_GROUP, kube.items(POD_GROUP)[0]["metadata"]["name"], {"phase": "Running"})
                while len(kube.items(POD)) < 32 or not kube.find(ASCEND_JOB, "big")["status"].get("restarts"):
                    await asyncio.sleep(0.001)
            for index in range(30):
                kube.remove(POD, f"big-worker-{index}")
            began = asyncio.get_running_loop().time()
            async with aio.timeout(10):
                while len(kube.items(POD)) < 32:
                    await asyncio.sleep(0.001)
            assert asyncio.get_running_loop().time() - began < 2

    aio.run(test())


def test_a_server_that_refuses_now_and_then() -> None:
    async def test() -> None:
        kube = FakeKube()
        chance = random.Random(5)

        def before(verb: str, kind: Kind, name: str) -> None:
            if chance.random() < 0.2:
                raise chance.choice(
                    [ApiError(500, "InternalError", "try later"), ConnectionError("reset"), TimeoutError()]
                )

        kube.before = before
        async with operator(kube), alongside(asyncio.create_task(nodes(kube))):
            for number in range(5):
                while True:
                    with contextlib.suppress(ApiError, OSError, TimeoutError):
                        await kube.create(ASCEND_JOB, ascend_job(f"job-{number}"))
                        break
            await until(kube, "Succeeded")

    aio.run(test())


def test_a_rank_table_that_could_not_be_written_is_written_later() -> None:
    async def test() -> None:
        kube = FakeKube()
        config = {"metadata": {"name": "rings-config-job", "namespace": "default"}}
        await kube.create(CONFIG_MAP, config)
        refusals = 3

        def before(verb: str, kind: Kind, name: str) -> None:
            nonlocal refusals
            if verb == "patch" and kind == CONFIG_MAP and refusals:
                refusals -= 1
                raise Conflict(409, "Conflict", "the object has been modified")

        kube.before = before
        async with operator(kube):
            await kube.create(ASCEND_JOB, ascend_job("job", workers=0))
            async with aio.timeout(20):
                while not kube.items(POD_GROUP):
                    await asyncio.sleep(0.005)
                kube.set_status(POD_GROUP, kube.items(POD_GROUP)[0]["metadata"]["name"], {"phase": "Running"})
                while not kube.items(POD):
                    await asyncio.sleep(0.005)
                kube.annotate(POD, "job-master-0", chips_annotation("job-master-0", "10.0.0.1", 8))
                kube.set_status(POD, "job-master-0", {"phase": "Running", "podIP": "172.16.0.1"})
                while not kube.find(CONFIG_MAP, "rings-config-job").get("data"):
                    await asyncio.sleep(0.005)
        assert refusals == 0

    aio.run(test())


def test_one_job_that_breaks_the_operator_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        kube = FakeKube()
        async with operator(kube), alongside(asyncio.create_task(nodes(kube))):
            bad = ascend_job("bad")
            bad["spec"]["replicaSpecs"]["Worker"]["replicas"] = "many"
            await kube.create(ASCEND_JOB, bad)
            await kube.create(ASCEND_JOB, ascend_job("good"))
            async with aio.timeout(10):
                while states(kube)["good"] != "Succeeded":
                    await asyncio.sleep(0.005)

    aio.run(test())
    assert "job default/bad" in caplog.text


class Line:
    """One operator's way to the server. It can be cut."""

    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube
        self.is_cut = False
        self.asked: list[tuple[str, str]] = []
        """What was asked for, leases apart."""

    def __getattr__(self, verb: str) -> Any:
        request = getattr(self._kube, verb)

        def ask(kind: Kind, *arguments: Any, **options: Any) -> Any:
            if self.is_cut:
                raise ConnectionError("cut")
            if kind != LEASE:
                self.asked.append((verb, kind.kind))
            return request(kind, *arguments, **options)

        return ask


def test_of_two_operators_one_acts_and_the_other_takes_over() -> None:
    async def test() -> None:
        kube = FakeKube()
        lines = [Line(kube), Line(kube)]

        def lead(number: int) -> asyncio.Task[None]:
            operator = Operator(cast(Kube, lines[number]), rank_tables=NOWHERE)
            leader = Leader(cast(Kube, lines[number]), "op", "mindx-dl", str(number))
            return asyncio.create_task(leader.lead(operator.run))

        first = lead(0)
        async with aio.timeout(20):
            while not lines[0].asked:
                await asyncio.sleep(0.005)
        second = lead(1)
        async with alongside(first, second):
            await kube.create(ASCEND_JOB, ascend_job("early", workers=3))
            async with alongside(asyncio.create_task(nodes(kube))):
                await until(kube, "Succeeded")
            assert lines[1].asked == [], "who doesn't lead doesn't even look"
            await kube.create(ASCEND_JOB, ascend_job("late", workers=3))
            async with aio.timeout(20):
                while len(kube.items(POD_GROUP)) != 1:
                    await asyncio.sleep(0.005)
            lines[0].is_cut = True
            with pytest.raises(LostLeadership):
                await first
            assert lines[1].asked == [], "the first has stopped before the second begins"
            async with alongside(asyncio.create_task(nodes(kube))):
                await until(kube, "Succeeded")
        created = [name for verb, kind, name in kube.calls if (verb, kind) == ("create", "Pod")]
        assert len(created) == len(set(created)) == 8

    virtual_time.run(test())


def test_options_of_the_original_are_understood() -> None:
    options = command.parser().parse_args(
        ["-enableGangScheduling=false", "-logFile=/x", "-logLevel=2", "-kubeApiQps=800", "-kubeApiBurst=800"]
    )
    assert (options.enableGangScheduling, options.logLevel, options.kubeApiBurst) == (False, 2, 800)
    assert command.parser().parse_args([]).enableGangScheduling is True
    assert command.parser().parse_args(["--enable-healthz", "-healthz-address=11252"]).healthz_address == 11252


def test_what_the_operator_cannot_use_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "kubeconfig"
    assert command.main(["--kubeconfig", str(broken)]) == 2
    assert f"{broken} is not a usable kubeconfig" in capsys.readouterr().err
    broken.write_text("clusters: [")
    assert command.main(["--kubeconfig", str(broken)]) == 2
    assert f"{broken} is not a usable kubeconfig" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["-healthz-address=70000"])
    assert "'70000' is not a port" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["-version"])
    assert capsys.readouterr().out.startswith("ascend-operator version: ")
