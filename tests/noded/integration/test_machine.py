"""Detectors on the real thing: cables that are pulled, file systems that become read-only or full, programs of others.

Interfaces and mounts are made in namespaces of the test's own; it needs a kernel that lets this user make them (root
always may), `ip`, `mount`, `unshare` and `nsenter`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from evertrain import aio
from evertrain.noded import codes
from evertrain.noded.detectors.base import Detector
from evertrain.noded.detectors.pressure import Pressure
from evertrain.noded.detectors.programs import Programs
from evertrain.noded.faults import AnyFault, ChipFault

OWN = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
PATIENCE = 120.0


def possible(*command: str) -> bool:
    found = all(shutil.which(tool) for tool in ("unshare", "ip", "mount", "nsenter"))
    return found and subprocess.run(["unshare", *OWN, *command], capture_output=True).returncode == 0


NETWORK = [["unshare", *OWN, "--net"]] if possible("--net", "ip", "link", "add", "a0", "type", "veth") else []
MOUNTS = [["unshare", *OWN, "--mount"]] if possible("--mount", "mount", "-t", "tmpfs", "none", "/tmp") else []

WATCH = """
import asyncio, json, subprocess, sys
from evertrain import aio

async def steps(detector, *commands):
    told = asyncio.Queue()
    task = asyncio.create_task(detector.run(lambda faults: told.put_nowait([[f.code, f.note] for f in faults])))
    last = await told.get()
    print(json.dumps(last), flush=True)
    for command in commands:
        subprocess.run(command, shell=True, check=True)
        while True:
            faults = await asyncio.wait_for(told.get(), 90)
            if faults != last:
                last = faults
                print(json.dumps(last), flush=True)
                break
    task.cancel()
"""


def said(namespace: list[str], script: str, *arguments: str) -> list[Any]:
    done = subprocess.run(
        [*namespace, sys.executable, "-c", WATCH + script, *arguments],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


CABLES = """
from evertrain.noded.detectors.links import Links
subprocess.run("ip link add a0 type veth peer name b0; ip link set a0 up; ip link set b0 up", shell=True, check=True)
aio.run(steps(
    Links(["a0"]),
    "ip link set b0 down", "ip link set b0 up", "ip link set a0 down", "ip link set a0 up", "ip link del a0",
    "ip link add a0 type veth peer name b0 && ip link set a0 up && ip link set b0 up && sleep 0.1",
))
"""


@pytest.mark.parametrize("namespace", NETWORK)
def test_a_cable_is_pulled(namespace: list[str]) -> None:
    lines = said(namespace, CABLES)
    # A link may be on its way up when it is first seen; and when it comes, it does so in several steps.
    states = [[] if not line else line[0] for line in lines]
    assert all(code == codes.LINK_DOWN for code, _ in filter(None, states))
    notes = [state[1] if state else "works" for state in states]
    told = [note for number, note in enumerate(notes) if number == 0 or note != notes[number - 1]]
    expected = iter(["a0 has no carrier", "works", "a0 was switched off", "works", "a0 is not there"])
    wanted = next(expected)
    for note in told:
        if note == wanted:
            wanted = next(expected, "")
    assert wanted == "", told


READ_ONLY = """
from evertrain.noded.detectors.storage import Storage
place = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], check=True)
# It is asked how full it is only once an hour: what comes is what the kernel has told.
aio.run(steps(Storage([place], every=3600.0), f"mount -o remount,ro {place}", f"mount -o remount,rw {place}"))
aio.run(steps(
    Storage([place], every=0.05),
    f"dd if=/dev/zero of={place}/big bs=4096 count=1000 2>/dev/null || true", f"rm {place}/big",
))
"""


@pytest.mark.parametrize("namespace", MOUNTS)
def test_a_file_system_becomes_read_only_and_another_full(tmp_path: Path, namespace: list[str]) -> None:
    assert said(namespace, READ_ONLY, str(tmp_path)) == [
        [],
        [[codes.READ_ONLY, f"{tmp_path} can only be read"]],
        [],
        [],
        [[codes.DISK_FULL, f"{tmp_path} is full"]],
        [],
    ]


async def test_the_kernel_is_asked_about_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Whether it lets us set a trigger or we read averages: nothing is wrong with this machine's memory."""
    caplog.set_level(logging.INFO)
    async with watching(Pressure(every=0.05)) as told:
        for _ in range(3):
            assert codes.MEMORY_PRESSURE not in [fault.code for fault in await told.get()]


# --- programs of others


@contextlib.asynccontextmanager
async def watching(detector: Detector) -> AsyncIterator[asyncio.Queue[list[AnyFault]]]:
    told: asyncio.Queue[list[AnyFault]] = asyncio.Queue()
    task = asyncio.create_task(detector.run(lambda faults: told.put_nowait(list(faults))))
    try:
        async with aio.timeout(PATIENCE):
            yield told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(told: asyncio.Queue[list[AnyFault]], condition: Callable[[list[AnyFault]], Any]) -> list[AnyFault]:
    while not condition(faults := await told.get()):
        pass
    return faults


def program(folder: Path, name: str, body: str, mode: int = 0o755) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(mode)
    return path


def detector(folder: Path, **settings: Any) -> Programs:
    settings = {"scan": 0.05, "again": 0.05, "first_delay": 0.02, **settings}
    return Programs(folder, environment={"NODE_NAME": "node-7"}, **settings)


CHIP = '{"kind": "chip", "code": "80E01801", "chip": %d}'


async def test_a_program_that_stays_is_listened_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    folder = tmp_path / "noded.d"
    folder.mkdir()
    program(
        folder, "one", f"""echo '{{"kind": "node", "code": "E8000001", "note": "'$NODE_NAME'"}}'; exec cat {pipe}"""
    )
    async with watching(detector(folder)) as told:
        first = await until(told, lambda faults: faults)
        assert (first[0].code, first[0].note) == ("E8000001", "node-7")
        with await asyncio.to_thread(open, pipe, "wb", 0) as pipe_end:
            say = partial(asyncio.to_thread, pipe_end.write)
            await say(f"{CHIP % 3}\n".encode())
            await until(told, lambda faults: len(faults) == 2)
            for line in (b"what is this?", b"x" * 200_000, b"[1]", b"", b"\xff\x00", (CHIP % 4).encode()):
                await say(line + b"\n")
            faults = await until(told, lambda faults: len(faults) == 3)
            assert {fault.chip for fault in faults if isinstance(fault, ChipFault)} == {3, 4}, "garbage does no harm"
            await say(b'{"kind": "clear"}\n')
            await until(told, lambda faults: not faults)


async def test_a_check_is_run_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "state").write_text(CHIP % 1)
    folder = tmp_path / "noded.d"
    folder.mkdir()
    program(folder, "check", f"cat {tmp_path}/state")
    async with watching(detector(folder)) as told:
        await until(told, lambda faults: [fault.chip for fault in faults] == [1])
        (tmp_path / "state").write_text("")
        await until(told, lambda faults: not faults)


async def test_a_program_that_crashes_is_started_again_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "noded.d"
    folder.mkdir()
    crashing = program(
        folder, "bad", f"echo '{CHIP % 1}'; test -e {tmp_path}/seen && exit 3; touch {tmp_path}/seen; kill -9 $$"
    )
    async with watching(detector(folder)) as told:
        await until(told, lambda faults: [fault.chip for fault in faults] == [1])
        faults = await until(told, lambda faults: len(faults) == 2)
        assert [fault.code for fault in faults] == ["80E01801", codes.PROGRAM_FAILS]
        assert faults[1].note == "detector bad fails again and again"
        crashing.unlink()
        await until(told, lambda faults: not faults)


async def test_programs_come_and_go(tmp_path: Path) -> None:
    folder = tmp_path / "noded.d"
    async with watching(detector(folder)) as told:
        assert await told.get() == []
        folder.mkdir()
        path = program(folder, "late", f"echo '{CHIP % 1}'; exec sleep 1000")
        await until(told, lambda faults: len(faults) == 1)
        words = ("1000", str(path))  # it has said something, and perhaps is not the sleep yet
        (process,) = [p for p in psutil.Process().children(recursive=True) if {*p.cmdline()} & {*words}]
        path.unlink()
        await until(told, lambda faults: not faults)
        assert not process.is_running()


async def test_what_others_could_have_put_there_is_not_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "noded.d"
    folder.mkdir()
    program(folder, "anybody", f"echo '{CHIP % 1}'", 0o777)
    program(folder, ".hidden", f"echo '{CHIP % 2}'")
    program(folder, "README", f"echo '{CHIP % 3}'", 0o644)
    program(folder, "good", f"echo '{CHIP % 4}'")
    (folder / "missing").symlink_to("nowhere")
    async with watching(detector(folder)) as told:
        faults = await until(told, lambda faults: faults)
        assert [fault.chip for fault in faults if isinstance(fault, ChipFault)] == [4]
    assert "anybody is not run: it can be changed by others than its owner" in caplog.text


async def test_no_program_outlives_its_detector(tmp_path: Path) -> None:
    """Neither one that doesn't want to end, nor what it has started."""
    folder = tmp_path / "noded.d"
    folder.mkdir()
    program(folder, "stubborn", f"trap '' TERM; sleep 1001 & echo '{CHIP % 1}'; while :; do sleep 1001; done")
    async with watching(detector(folder)) as told:
        await until(told, lambda faults: faults)
        words = ("1001", "stubborn")
        children = [
            child
            for child in psutil.Process().children(recursive=True)
            if any(word in part for part in child.cmdline() for word in words)
        ]
        assert len(children) >= 2
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, PATIENCE)
    assert not alive


async def test_a_program_learns_of_our_death(tmp_path: Path) -> None:
    """Its input ends, whatever happens to noded."""
    folder = tmp_path / "noded.d"
    folder.mkdir()
    program(folder, "waits", f"echo $$ >{tmp_path}/pid; echo '{CHIP % 1}'; cat; touch {tmp_path}/ended")
    script = (
        "import pathlib, sys\nfrom evertrain import aio\nfrom evertrain.noded.detectors.programs import Programs\n"
        "aio.run(Programs(pathlib.Path(sys.argv[1])).run(lambda faults: faults and print(faults, flush=True)))"
    )
    noded = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(folder), stdout=asyncio.subprocess.PIPE, env=ENVIRONMENT
    )
    assert noded.stdout
    async with aio.timeout(PATIENCE):
        await noded.stdout.readline()
        waiting = psutil.Process(int((tmp_path / "pid").read_text()))
        noded.send_signal(signal.SIGKILL)
        await noded.wait()
        await asyncio.to_thread(waiting.wait, PATIENCE)
    assert (tmp_path / "ended").exists()
