"""Orders to a running launcher, with real processes: what becomes of them, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from evertrain.mindio.control import ControlError, Door, parse_address, read_door, write_door
from evertrain.mindio.tls import VARIABLES
from tests.certificates import Authority
from tests.launch.launching import TRAINER, Result, environment, finish, read_events, start, wait_for

CTL = [sys.executable, "-m", "evertrain.cli.main", "ctl", "--wait=20"]


class Job:
    def __init__(self, folder: Path, *options: str, steps: int = 3000, seconds: float = 0.01) -> None:
        self.events_file = folder / "events"
        script = folder / "trainer.py"
        script.write_text(TRAINER)
        self._began = time.monotonic()
        self.launcher = start(
            "--nproc-per-node=3", "--ft-warm=0", "--ft-bound=1", "--ft-events", self.events_file, *options,
            script, steps, seconds, folder,
        )  # fmt: skip
        self.ended = False

    def events(self, name: str) -> list[dict[str, Any]]:
        return read_events(self.events_file, name)

    def begin(self, *order: str) -> subprocess.Popen[str]:
        command = [*CTL, f"--events={self.events_file}", *order]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())

    def order(self, *order: str, code: int = 0) -> str:
        return answer(self.begin(*order), code)

    def step(self) -> int:
        return json.loads(self.order("status"))["step"]

    def finish(self) -> Result:
        self.ended = True
        self.events_file.with_name("hurry").touch()  # the steps that are left take no time
        return finish(self.launcher, self._began, self.events_file)


def answer(asker: subprocess.Popen[str], code: int = 0) -> str:
    out, err = asker.communicate(timeout=30)
    assert asker.returncode == code, (out, err)
    return out + err


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Job]:
    started = Job(folder, *options)
    try:
        wait_for(lambda: started.events("generation"), "the training")
        yield started
    finally:
        if not started.ended:
            started.launcher.kill()
            started.finish()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with running(tmp_path) as started:
        yield started


def test_pause_and_continue(job: Job) -> None:
    assert "paused at step" in job.order("pause", "--timeout=60")
    before = job.step()
    time.sleep(1.5)  # longer than the detection bound
    assert job.step() == before
    assert "goes on" in job.order("continue")
    result = job.finish()
    assert result.code == 0 and not result.incidents, result
    assert not Path(f"{job.events_file}.control").exists(), "the token is left behind"


def test_a_process_is_exchanged_and_the_old_one_leaves(job: Job) -> None:
    (old,) = [event["pid"] for event in job.events("started") if event["rank"] == 1]
    job.order("hot-switch", "--rank=1")
    wait_for(lambda: not Path(f"/proc/{old}").exists(), "the end of the old process")
    result = job.finish()
    assert result.code == 0, result
    (incident,) = result.incidents
    assert (incident["decision"], incident["restarted"]) == ("hot-switch", [1])
    assert sum(incident["phases_ms"].values()) == pytest.approx(incident["total_ms"], abs=0.1)
    assert "rank 1 has a new process ready; its process was exchanged" in result.err


def test_a_switch_is_cancelled_and_its_process_ended(job: Job) -> None:
    job.order("pause", "--timeout=60")
    asker = job.begin("hot-switch", "--rank=1")
    wait_for(lambda: job.events("switch")[-1:] and job.events("switch")[-1]["state"] == "ready", "the new process")
    shadow = job.events("started")[-1]["pid"]
    job.order("cancel-switch")
    assert "cancelled" in answer(asker, 1)
    wait_for(lambda: not Path(f"/proc/{shadow}").exists(), "the end of the new process")
    job.order("continue")
    result = job.finish()
    assert result.code == 0 and not result.incidents, result


@pytest.mark.parametrize("victim", ["new", "old"])
def test_either_process_may_die_during_a_switch(job: Job, victim: str) -> None:
    job.order("pause", "--timeout=60")
    asker = job.begin("hot-switch", "--rank=1")
    wait_for(lambda: job.events("switch")[-1:] and job.events("switch")[-1]["state"] == "ready", "the new process")
    first, second = [event["pid"] for event in job.events("started") if event["rank"] == 1]
    os.kill(second if victim == "new" else first, signal.SIGKILL)
    text = answer(asker, 1 if victim == "new" else 0)
    assert ("came to nothing" in text) == (victim == "new")
    if victim == "old":
        wait_for(lambda: job.events("incident"), "the recovery")
    job.order("continue")
    result = job.finish()
    assert result.code == 0, result
    assert [i["decision"] for i in result.incidents] == ([] if victim == "new" else ["recover-in-place"])
    assert len([event for event in result.events if event["event"] == "started" and event["rank"] == 1]) == 2


def test_whoever_does_not_know_the_token_gives_no_orders(job: Job) -> None:
    door = Path(f"{job.events_file}.control")
    assert door.stat().st_mode & 0o077 == 0, "others can read the token"
    address = job.events("control")[0]["address"]
    stranger = subprocess.run(
        [*CTL, f"--address={address}", "pause"], capture_output=True, text=True,
        env=environment(EVERTRAIN_TOKEN="guessed"),
    )  # fmt: skip
    assert stranger.returncode == 1 and "wrong job token" in stranger.stderr
    token = json.loads(door.read_text())["token"]
    assert token not in job.events_file.read_text(), "the token is in the timeline"
    assert job.step() > 0
    os.kill(job.launcher.pid, signal.SIGTERM)
    assert job.finish().code == 143
    assert not door.exists()


def test_orders_over_tls(tmp_path: Path) -> None:
    """Who can read the events file's neighbour needs nothing else; others need a certificate of the authority."""
    ours, theirs = Authority(tmp_path).issue(), Authority(tmp_path, "stranger").issue()
    with running(tmp_path, *ours.flags) as job:
        assert "paused at step" in job.order("pause", "--timeout=60")
        door = Path(f"{job.events_file}.control")
        assert door.stat().st_mode & 0o077 == 0 and "PRIVATE" not in door.read_text()
        token, address = json.loads(door.read_text())["token"], job.events("control")[0]["address"]
        for files, code, words in (
            ((ours.cert, ours.key, ours.ca), 0, '"state": "paused"'),
            ((), 1, "this controller speaks TLS"),
            ((theirs.cert, theirs.key, ours.ca), 1, "does not know the authority"),
            ((theirs.cert, theirs.key, theirs.ca), 1, "of an authority that we don't trust"),
        ):
            env = environment(EVERTRAIN_TOKEN=token, **dict(zip(VARIABLES, files, strict=False)))
            asked = subprocess.run([*CTL, f"--address={address}", "status"], capture_output=True, text=True, env=env)
            assert (asked.returncode, words in asked.stdout + asked.stderr) == (code, True), asked
            assert "Traceback" not in asked.stderr, asked
        job.order("continue")
        result = job.finish()
    assert result.code == 0 and not result.incidents, result


def test_orders_that_can_not_be_given(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    Path(f"{damaged}.control").write_text('{"address": 5}')
    for more, code, reason in (
        ([f"--events={tmp_path / 'none'}"], 1, "has ended"),
        ([f"--events={damaged}"], 1, "can't be used"),
        ([], 1, "which job?"),
        (["--address=127.0.0.1:1"], 1, "token is missing"),
        (["--address=127.0.0.1:65536"], 1, "token is missing"),
        (["--wait=-1"], 2, "invalid seconds value"),
    ):
        env = {name: value for name, value in environment().items() if not name.startswith("EVERTRAIN_")}
        result = subprocess.run([*CTL, *more, "status"], capture_output=True, text=True, env=env)
        assert result.returncode == code and reason in result.stderr, result


@pytest.mark.parametrize("address", ["127.0.0.1:65536", "127.0.0.1:0", "127.0.0.1", ":5", "h:x"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ControlError, match="expected HOST:PORT"):
        parse_address(address)


def test_the_file_for_orders_is_nobody_elses(tmp_path: Path) -> None:
    """Somebody who can write to the folder has guessed the name under which it is made."""
    events = str(tmp_path / "events")
    for guess in (f"{events}.control", f"{events}.control.{os.getpid()}"):
        Path(guess).write_text("")
        Path(guess).chmod(0o666)
    door = Door(("127.0.0.1", 5), "secret")
    path = write_door(events, door)
    assert os.stat(path).st_mode & 0o077 == 0
    assert read_door(events) == door
    assert "secret" not in Path(f"{path}.{os.getpid()}").read_text()
