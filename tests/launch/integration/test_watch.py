"""Death is seen before the kernel has cleaned up, a stop without polling, and an exec is not a death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from evertrain import aio
from evertrain.launch.processes import Process
from evertrain.launch.watch import Watcher
from evertrain.mindio import board
from tests.launch.launching import environment

PREPARE = "from evertrain.mindio import board, lifeline\nassert lifeline.hold()\n"
READY = "print('ready', flush=True)\n"
BIG = "b = bytearray(400 << 20)\nfor i in range(0, len(b), 4096): b[i] = 1\n"


class Log:
    """Runs one process under a watcher and notes what it says, with the time."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int | None, float]] = []
        self.changed = asyncio.Event()

    def note(self, what: str, code: int | None = None) -> None:
        self.said.append((what, code, time.monotonic()))
        self.changed.set()

    async def wait_for(self, what: str) -> tuple[int | None, float]:
        async with aio.timeout(20):
            while True:
                for name, code, at in self.said:
                    if name == what:
                        return code, at
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
def watched():
    """`watched(code, scenario)`: start the code, watch it, run the scenario(process, log, watcher)."""

    def run(code, scenario, poll=10.0):
        async def main():
            progress = board.Board()
            popen = subprocess.Popen(
                [sys.executable, "-c", code],
                env={**environment(), board.BOARD_FD: str(progress.fd)},
                pass_fds=(progress.fd,),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            process = Process(popen, progress, os.memfd_create("stack", 0), {})
            log = Log()
            watcher = Watcher(
                asyncio.get_running_loop(),
                poll,
                on_dying=lambda process, code: log.note("dying", code),
                on_stopped=lambda process: log.note("stopped"),
                on_ended=lambda process, code: log.note("ended", code),
            )
            try:
                assert popen.stdout.readline() == b"ready\n"
                # A high poll: what is seen early can't have been seen by looking often.
                process.board.mark(board.COMPUTE)
                watcher.add(process)
                await scenario(process, log, watcher)
            finally:
                process.kill()
                if process.code is None:
                    await log.wait_for("ended")
                watcher.close()
                popen.stdin.close()
                popen.stdout.close()
                process.close()

        aio.run(main())

    return run


def test_death_is_known_before_the_memory_is_gone(watched):
    async def scenario(process, log, watcher):
        os.kill(process.pid, signal.SIGKILL)
        code, dying = await log.wait_for("dying")
        assert code == -9
        code, ended = await log.wait_for("ended")
        assert code == -9
        assert dying < ended

    watched(PREPARE + BIG + READY + "input()", scenario)


def test_an_exit_code_is_known_as_early(watched):
    async def scenario(process, log, watcher):
        process.popen.stdin.write(b"\n")
        process.popen.stdin.flush()
        assert (await log.wait_for("dying"))[0] == 5

    watched(PREPARE + BIG + READY + "input(); import os; os._exit(5)", scenario)


def test_a_clean_exit_is_no_fault(watched):
    async def scenario(process, log, watcher):
        process.popen.stdin.write(b"\n")
        process.popen.stdin.flush()
        assert (await log.wait_for("ended"))[0] == 0
        assert "dying" not in [what for what, _, _ in log.said]

    watched(PREPARE + READY + "input()", scenario)


def test_a_stop_is_seen_without_polling(watched):
    async def scenario(process, log, watcher):
        began = time.monotonic()
        os.kill(process.pid, signal.SIGSTOP)
        _, at = await log.wait_for("stopped")
        assert at - began < 5

    watched(PREPARE + READY + "input()", scenario)


def test_children_that_come_and_go_are_not_the_process_itself(watched):
    async def scenario(process, log, watcher):
        process.popen.stdin.write(b"\n")
        process.popen.stdin.flush()
        await asyncio.to_thread(process.popen.stdout.readline)
        assert log.said == []

    forks = "for _ in range(5):\n    if os.fork() == 0: os._exit(3)\n    os.wait()\n"
    code = f"input()\nimport os\n{forks}print('x', flush=True)\ninput()"
    watched(PREPARE + READY + code, scenario)


def test_a_process_that_becomes_another_program_is_alive_and_still_watched(watched):
    async def scenario(process, log, watcher):
        process.popen.stdin.write(b"\n")
        process.popen.stdin.flush()
        assert await asyncio.to_thread(process.popen.stdout.readline) == b"other\n"
        await asyncio.sleep(0.1)
        assert log.said == []
        os.kill(process.pid, signal.SIGKILL)
        assert (await log.wait_for("dying"))[0] == -9

    code = "input()\nimport os\nos.execv('/bin/sh', ['sh', '-c', 'echo other; exec sleep 1000'])"
    watched(PREPARE + READY + code, scenario)


def test_without_the_lock_polling_sees_it(watched):
    async def scenario(process, log, watcher):
        os.kill(process.pid, signal.SIGKILL)
        _, dying = await log.wait_for("dying")
        _, ended = await log.wait_for("ended")
        assert dying < ended

    watched(BIG + READY + "input()", scenario, poll=0.002)
