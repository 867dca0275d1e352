"""ClusterD's timeline on an API server: what a user sees of a recovery, restarts, and an API server that is away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from evertrain.cli.main import main
from evertrain.clusterd import shell
from evertrain.clusterd.model import Job
from evertrain.clusterd.recover.events import Note
from evertrain.clusterd.timeline.history import CONFIG_MAP_PREFIX, KEY, PUBLISHED
from evertrain.clusterd.timeline.shell import Timeline
from evertrain.kube.port import ASCEND_JOB, CONFIG_MAP, EVENT, ApiError, Kube, NotFound
from tests.clusterd.running import running
from tests.operator.acjobs import ascend_job
from tests.operator.cluster import Cluster, cluster, until

START = float(int(time.time()) - 1000)
"""Not long ago: what is old is not kept."""

RECOVERY = [
    (0.0, Note("opened", "rank 3 failed", {"id": "18AC-00ff"})),
    (0.01, Note("fault", "killed by SIGKILL", {"rank": 3, "type": "1", "code": "80E01801", "node": "n1"})),
    (0.04, Note("phase", "stop")),
    (0.095, Note("decision", "its process is lost", {"strategy": "recover-in-place"})),
    (0.096, Note("phase", "rebuild")),
    (0.4, Note("fallback", "it did not start", {"from": "recover-in-place", "to": "recover"})),
    (0.401, Note("decision", "the pod is replaced", {"strategy": "recover"})),
    (0.5, Note("phase", "repair")),
    (0.72, Note("closed", "all ranks train", {"outcome": "recovered", "ok": True})),
]


@contextlib.asynccontextmanager
async def timeline(kube: Kube, path: Path | None = None) -> AsyncIterator[Timeline]:
    kept = Timeline(kube, path)
    await kept.start()
    try:
        yield kept
    finally:
        await kept.close()


async def job_on(running: Cluster, name: str = "bert") -> Job:
    made = await running.kube.create(ASCEND_JOB, ascend_job(name))
    return Job(uid=made["metadata"]["uid"], name=name, namespace="default")


async def command(running: Cluster, *arguments: str) -> int:
    """In a thread, for the server is in this loop."""
    running.client()  # writes the kubeconfig
    kubeconfig = running.folder / f"kubeconfig-{running.server.port}"
    return await asyncio.to_thread(main, ["timeline", *arguments, "--kubeconfig", str(kubeconfig)])


async def test_a_recovery_is_seen_in_the_timeline_and_in_the_events_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timeline.db"
    async with cluster(tmp_path) as running:
        job = await job_on(running)
        async with timeline(running.client(), path) as kept:
            for after, note in RECOVERY:
                kept.note(job, note, START + after)
            assert [each.id for each in await kept.recorded("bert")] == ["18AC-00ff"]
        events = (await running.kube.list(EVENT, "default")).items
        assert sorted(event["reason"] for event in events) == [
            "RecoveryDecided",
            "RecoveryDecided",
            "RecoveryFallback",
            "RecoveryStarted",
            "RecoverySucceeded",
            "TrainingFault",
        ]
        assert {event["involvedObject"]["uid"] for event in events} == {job.uid}

        assert await command(running, "bert") == 0
        shown = capsys.readouterr().out
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(START))
        assert shown.splitlines() == [
            "incident  time                     faults        decision  total ms  outcome",
            f"18AC      {at}.000  rank 3 other  recover        720  recovered",
            "",
            "18AC  rank 3 failed",
            "      - rank 3, other fault, code 80E01801, node n1: killed by SIGKILL",
            "      fallback after 400 ms: recover-in-place -> recover: it did not start",
            "      decision: recover: the pod is replaced",
            "      phases: detect 40 + stop 56 + rebuild 404 + repair 220 = 720 ms",
            "      recovered: all ranks train",
        ]
        assert await command(running, "acjob/bert", "-o", "json") == 0
        (record,) = json.loads(capsys.readouterr().out)
        assert record["id"] == "18AC-00ff" and sum(record["phases_ms"].values()) == record["total_ms"] == 720

        await running.kube.delete(ASCEND_JOB, "bert", "default")
        await until(lambda: _is_gone(running, CONFIG_MAP_PREFIX + "bert"))
    assert main(["timeline", "--db", str(path), "bert", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [record], "of a job that is gone, too"
    assert main(["timeline", "--db", str(path)]) == 0
    assert "default/bert" in capsys.readouterr().out
    assert main(["timeline", "--db", str(path), "gpt"]) == 0
    assert capsys.readouterr().out == "No incidents.\n"


async def _is_gone(running: Cluster, name: str) -> bool:
    try:
        await running.kube.get(CONFIG_MAP, name, "default")
    except NotFound:
        return True
    return False


@pytest.mark.parametrize("kept_on_disk", [False, True])
async def test_whoever_takes_over_goes_on_with_the_same_incident(tmp_path: Path, kept_on_disk: bool) -> None:
    """Another replica has another disk; then what is published has to be enough."""
    async with cluster(tmp_path) as running:
        job = await job_on(running)
        whole = None
        for cut in range(1, len(RECOVERY)):
            named = [(at, Note(n.kind, n.text, {**n.details, "id": f"R{cut}-x"})) for at, n in RECOVERY]
            for turn, part in enumerate((named[:cut], named[cut:])):
                path = tmp_path / ("timeline.db" if kept_on_disk else f"timeline-{cut}-{turn}.db")
                async with timeline(running.kube, path) as kept:
                    for after, note in part:
                        kept.note(job, note, START + cut + after)
                    found = kept.incidents(job.uid)[-1]
            shape = (found.durations, found.faults, found.outcome, found.decision)
            whole = whole or shape
            assert shape == whole and found.id == f"R{cut}-x"
            async with timeline(running.kube, path) as kept:
                assert [each.id for each in kept.incidents(job.uid)] == [f"R{number}-x" for number in range(1, cut + 1)]


async def test_of_two_with_a_file_each_who_leads_knows_what_the_other_has_led(tmp_path: Path) -> None:
    """As in two pods. Jobs that are gone are in one file only."""
    first, second = tmp_path / "first.db", tmp_path / "second.db"
    async with cluster(tmp_path) as running:
        job = await job_on(running)
        async with timeline(running.kube, first) as kept:
            for after, note in RECOVERY[:3]:
                kept.note(job, note, START + after)
        async with timeline(running.kube, second) as kept:
            for after, note in RECOVERY[3:]:
                kept.note(job, note, START + after)
            kept.note(job, Note("opened", "rank 1 failed", {"id": "next-1"}), START + 2)
            expected = await kept.recorded()
            assert [(each.id, each.closed) for each in expected] == [("18AC-00ff", True), ("next-1", False)]
        async with timeline(running.kube, first) as kept:
            assert await kept.recorded() == expected
        async with timeline(running.kube, tmp_path / "third.db") as kept:
            assert await kept.recorded() == expected


async def test_jobs_that_are_not_there_and_jobs_without_incidents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cluster(tmp_path) as running:
        job = await job_on(running)
        assert await command(running, "bert") == 0
        assert capsys.readouterr().out == "No incidents.\n"
        assert await command(running, "bert", "-o", "json") == 0
        assert json.loads(capsys.readouterr().out) == []
        assert await command(running, "gpt") == 1
        assert "there is no job gpt in namespace default" in capsys.readouterr().err
        assert await command(running, "bert", "-n", "team") == 1
        assert "there is no job bert in namespace team" in capsys.readouterr().err

        async with timeline(running.kube) as kept:
            kept.note(job, RECOVERY[0][1], START)
        assert await command(running, "bert") == 0
        assert " open" in (shown := capsys.readouterr().out) and "so far" in shown
        await running.kube.patch(CONFIG_MAP, CONFIG_MAP_PREFIX + "bert", "default", {"data": {KEY: "[{]"}})
        assert await command(running, "bert") == 1
        assert "is not readable" in capsys.readouterr().err
        async with timeline(running.kube) as kept:  # nor does it keep ClusterD from starting
            kept.note(job, Note("opened", "rank 1 failed", {"id": "B-1"}), START)
        assert await command(running, "bert") == 0
        assert "rank 1 failed" in capsys.readouterr().out


class Away:
    """An API server that can't be reached until it is told otherwise."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self.reachable = asyncio.Event()
        self.refused = asyncio.Event()

    def __getattr__(self, name: str) -> object:
        async def ask(*arguments: object, **options: object) -> object:
            if not self.reachable.is_set():
                self.refused.set()
                raise ConnectionError("no route to host")
            return await getattr(self._kube, name)(*arguments, **options)

        return ask


async def test_an_api_server_that_is_away_delays_nothing_and_gets_the_newest_state_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path) as running:
        job = await job_on(running)
        away = Away(running.kube)
        away.reachable.set()
        async with timeline(away) as kept:  # type: ignore[arg-type]
            away.reachable.clear()
            for after, note in RECOVERY[:-1]:
                kept.note(job, note, START + after)
            await away.refused.wait()
            kept.note(job, RECOVERY[-1][1], START + RECOVERY[-1][0])
            away.reachable.set()

            async def published() -> bool:
                with contextlib.suppress(NotFound):
                    found = await running.kube.get(CONFIG_MAP, CONFIG_MAP_PREFIX + "bert", "default")
                    return json.loads(found["data"][KEY])[0]["outcome"] == "recovered"
                return False

            await until(published, 60)
        assert len([each for each in caplog.records if "can't be published" in each.getMessage()]) == 1


async def test_a_storm_of_incidents_costs_few_writes_and_the_newest_are_there(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        jobs = [await job_on(running, f"job-{number}") for number in range(5)]
        counted = _Counting(running.kube)
        path = tmp_path / "timeline.db"
        async with timeline(counted, path) as kept:  # type: ignore[arg-type]
            for number in range(200):
                for job in jobs:
                    for after, note in RECOVERY:
                        named = Note(note.kind, note.text, {**note.details, "id": f"{number:04d}-{job.name}"})
                        kept.note(job, named, START + number + after)
                await asyncio.sleep(0)
        assert counted.writes < 300, "9000 notes"
        for job in jobs:
            found = await running.kube.get(CONFIG_MAP, CONFIG_MAP_PREFIX + job.name, "default")
            ids = [each["id"] for each in json.loads(found["data"][KEY])]
            assert ids == [f"{number:04d}-{job.name}" for number in range(200 - PUBLISHED, 200)]
        async with timeline(running.kube, path) as kept:
            assert len(await kept.recorded()) == 1000


class _Counting:
    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self.writes = 0

    def __getattr__(self, name: str) -> object:
        async def ask(*arguments: object, **options: object) -> object:
            self.writes += name in ("create", "patch", "replace", "apply")
            return await getattr(self._kube, name)(*arguments, **options)

        return ask


async def test_jobs_that_went_while_nobody_was_here_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "timeline.db"
    async with cluster(tmp_path) as running:
        job = await job_on(running)
        async with timeline(running.kube, path) as kept:
            kept.note(job, RECOVERY[0][1], START)
        async with timeline(running.kube, path) as kept:
            kept.retain([], START + 60)
            (found,) = await kept.recorded()
            assert (found.outcome, found.total_ms) == ("job gone", 60_000)
            assert kept.incidents(job.uid) == ()


async def test_refusals_of_the_server_are_no_crash(tmp_path: Path) -> None:
    class Forbidding:
        def __getattr__(self, name: str) -> object:
            async def ask(*arguments: object, **options: object) -> object:
                raise ApiError(403, "Forbidden", "not for you")

            return ask

    async with timeline(Forbidding()) as kept:  # type: ignore[arg-type]
        kept.note(Job("u", "bert", "default"), RECOVERY[0][1], START)
        assert len(kept.incidents("u")) == 1


async def test_a_recovery_that_clusterd_leads_is_shown_and_kept_when_its_job_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "FORGET_SECONDS", 0.1)
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        before = await training.uids()
        client, signals = await training.join()
        await client.fault({2: 0})
        await signals.next()
        await client.stopped()
        await signals.next()
        await client.can("retry", "recover")
        await signals.next()
        await client.went("retry", 405)
        await signals.next()
        await client.can("recover")
        await signals.next()
        await training.replaced(before, 1)
        await client.went("recover")
        await training.reported("recover-success")
        await training.ended(True)

        async def shown() -> bool:
            await command(clusterd.cluster, "bert", "-o", "json")
            found = json.loads(capsys.readouterr().out)
            return bool(found) and found[-1]["outcome"] != "open"

        await until(shown, 60)
        assert await command(clusterd.cluster, "bert") == 0
        text = capsys.readouterr().out
        assert "fallback after" in text and "retry -> recover" in text and "decision: recover: " in text
        for phase in ("detect", "stop", "retry"):
            assert f" {phase} " in text.partition("phases:")[2]

        # In the middle of the next one the job is deleted.
        await client.fault({0: 1})
        await signals.next()
        training.spares = 0
        await training.kube.delete(ASCEND_JOB, "bert", "default")

        async def forgotten() -> bool:
            return not clusterd.clusterd.timeline.incidents(training.uid)

        await until(forgotten, 60)
        first, second = await clusterd.clusterd.timeline.recorded(training.uid)
        assert first.ok and second.closed and not second.ok
