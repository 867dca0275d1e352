"""Warm spares: ready when the job trains, a rank within a moment, and made anew after each use."""

from __future__ import annotations

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest

from evertrain import aio
from evertrain.launch.spares import Spares
from tests.launch.launching import TRAINER, finish, start, wait_for

pytest.importorskip("torch")


def command_line(pid):
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read().split("\0")


@pytest.fixture
def job(tmp_path):
    """Start a job that trains until it is told to finish; ends with it."""
    script, events, end = tmp_path / "trainer.py", tmp_path / "events.jsonl", tmp_path / "end"
    script.write_text(TRAINER.replace("while step < steps:", f"while not os.path.exists({str(end)!r}):"))
    launchers = []

    class Job:
        def __init__(self):
            self.script = script

        def start(self, *options):
            self.began = time.monotonic()
            arguments = ["--nproc-per-node=2", "--ft-bound=1", "--ft-events", events, *options, script]
            self.launcher = start(*arguments, 0, 0.02, tmp_path)
            launchers.append(self.launcher)

        def seen(self, event, **fields):
            lines = events.read_text().splitlines() if events.exists() else []
            found = [record for record in map(json.loads, lines) if record["event"] == event]
            return [record for record in found if fields.items() <= record.items()]

        def wait_for(self, event, count=1, **fields):
            wait_for(lambda: len(self.seen(event, **fields)) >= count, f"{count} x {event} {fields}", 90)
            return self.seen(event, **fields)

        def kill(self, rank):
            os.kill(self.seen("started", rank=rank)[-1]["pid"], signal.SIGKILL)

        def finish(self):
            end.touch()
            return finish(self.launcher, self.began, events)

    yield Job()
    for launcher in launchers:
        if launcher.poll() is None:
            launcher.kill()
            launcher.communicate()


@pytest.mark.parametrize("options", [[], pytest.param(["--ft-park"], marks=pytest.mark.matrix)])
def test_a_spare_takes_the_place_of_a_killed_rank_and_another_is_made(job, options):
    job.start(*options)
    (spare,) = job.wait_for("spare")
    assert command_line(spare["pid"])[2:6] == ["-m", "evertrain.torch.spare", "--rank", "unknown"]
    job.kill(1)
    (incident,) = job.wait_for("incident")
    assert incident["outcome"] == "recovered"
    (started,) = job.seen("started", rank=1, incarnation=1)
    assert started["warm"] and started["pid"] == spare["pid"]
    assert command_line(spare["pid"])[4:8] == ["--rank", "1      ", "--", str(job.script)]
    (first,) = job.seen("started", rank=0)
    assert command_line(first["pid"])[2:7] == ["-m", "evertrain.torch.boot", "--rank", "0", "--"]
    again = job.wait_for("spare", count=2)[-1]
    job.kill(0)
    job.wait_for("incident", count=2)
    assert job.seen("started", rank=0, incarnation=1)[0]["pid"] == again["pid"]
    result = job.finish()
    assert result.code == 0, result
    assert result.out.count("[rank1]: training on 1\n") == 2, "its output carries the rank that it got"
    assert "replaced by a warm spare" in result.err


@pytest.mark.matrix
def test_a_spare_that_was_stopped_is_replaced_and_never_becomes_a_rank(job):
    job.start()
    (first,) = job.wait_for("spare")
    os.kill(first["pid"], signal.SIGSTOP)
    wait_for(lambda: not os.path.exists(f"/proc/{first['pid']}"), "the end of the stopped spare")
    job.wait_for("spare", count=2)
    assert job.finish().code == 0


def test_a_spare_that_dies_with_a_rank_is_not_its_replacement(tmp_path):
    """It is reaped only after its memory is torn down; until then it looks as if it was still there."""

    class Spawner:
        park = False

    async def scenario():
        spares = Spares(Spawner(), 1, watch=print, on_ready=print, say=print)
        dying, waiting = (SimpleNamespace(is_ready=True, reported=reported) for reported in (True, False))
        spares._spares = [dying, waiting]
        assert spares.ready == 1
        assert spares.take() is waiting and spares.take() is None

    aio.run(scenario())


def test_no_spare_on_demand_and_none_for_a_script_without_training(job, tmp_path):
    job.start("--ft-warm=0")
    job.wait_for("generation")
    time.sleep(1.0)
    assert not job.seen("spare")
    job.kill(1)
    job.wait_for("incident")
    assert job.seen("started", rank=1, incarnation=1, warm=False)
    assert job.finish().code == 0


def test_a_fault_before_the_spare_is_ready_is_answered_with_a_new_process(job):
    job.start()
    job.wait_for("generation")
    time.sleep(0.3)
    job.kill(1)
    job.wait_for("incident")
    assert job.seen("started", rank=1, incarnation=1, warm=False)
    assert job.finish().code == 0


@pytest.mark.matrix
def test_no_spare_outlives_a_killed_launcher(job):
    job.start()
    (spare,) = job.wait_for("spare")
    job.launcher.kill()
    job.launcher.communicate()
    wait_for(lambda: not os.path.exists(f"/proc/{spare['pid']}"), "the end of the spare", 10)


def test_a_spare_is_told_what_the_ranks_have_imported(job, tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(
        script.read_text().replace("board.progress(", "board.leave_imports(['torch.fft']); board.progress(")
    )
    job.start()
    (spare,) = job.wait_for("spare")
    with open(f"/proc/{spare['pid']}/environ", "rb") as file:
        assert b"EVERTRAIN_LEARNED_IMPORTS=torch.fft" in file.read().split(b"\0")
    assert job.finish().code == 0
