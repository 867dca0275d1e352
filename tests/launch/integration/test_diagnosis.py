"""The four ways of being stuck, told apart from outside on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from evertrain import aio
from evertrain.launch import procfs, stalls
from evertrain.launch.diagnosis import Evidence, diagnose
from evertrain.launch.processes import Process
from evertrain.mindio.board import Board
from tests.launch.launching import environment, wait_for

# A rank in miniature: dumps its stack on the signal, and has a thread that answers on the board.
VICTIM = """
import faulthandler, os, re, signal, sys, threading, time
from evertrain.mindio.board import Board
board_fd, stack_fd, ping_fd = map(int, sys.argv[1:4])
board = Board(board_fd)
faulthandler.register(signal.SIGRTMIN + 8, file=stack_fd, all_threads=True, chain=False)

def answer():
    while True:
        board.pong(os.read(ping_fd, 1)[0])

threading.Thread(target=answer, daemon=True).start()
print("ready", flush=True)
def stuck_here():
    exec(sys.argv[4])
stuck_here()
"""


@pytest.fixture
def look(tmp_path):
    """Start a process that runs this code, and gather the evidence once it is in it."""
    processes = []

    def gather(code: str, before=lambda pid: None) -> Evidence:
        board = Board()
        stack_fd = os.memfd_create("stack", 0)
        ours, theirs = os.pipe()
        popen = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(board.fd), str(stack_fd), str(ours), code],
            pass_fds=(board.fd, stack_fd, ours),
            stdout=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )
        os.close(ours)
        assert popen.stdout.readline() == b"ready\n"
        process = Process(popen, board, stack_fd, {})
        processes.append((process, theirs))
        threading.Event().wait(0.1)  # until it is in the code; there is no other sign of that
        before(popen.pid)
        return aio.run(stalls.gather(process, lambda: os.write(theirs, b"\x07"), lambda: board.last_pong == 7))

    yield gather
    for process, fd in processes:
        process.kill()
        process.reap()
        process.popen.stdout.close()
        process.close()
        os.close(fd)


def test_blocked_in_a_system_call(look):
    evidence = look("time.sleep(1000)")
    verdict = diagnose(evidence)
    assert (verdict.kind, verdict.patient) == ("syscall", False), (verdict, evidence)
    assert all("stuck_here" in stack for stack in evidence.stacks)


def test_holding_the_gil(look):
    evidence = look("re.match(r'(a+)+$', 'a' * 60 + 'b')")
    verdict = diagnose(evidence)
    assert (verdict.kind, verdict.patient) == ("gil", False), (verdict, evidence)
    assert "stuck_here" in evidence.stacks[0], "the dump needs no interpreter lock"


def test_sleeping_with_the_gil(look):
    evidence = look("import ctypes; ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)")
    verdict = diagnose(evidence)
    assert (verdict.kind, verdict.patient) == ("gil", False), (verdict, evidence)


def test_an_endless_loop(look):
    evidence = look("while True: pass")
    verdict = diagnose(evidence)
    assert (verdict.kind, verdict.patient) == ("busy", True), (verdict, evidence)


def test_stopped(look):
    evidence = look("while True: pass", before=lambda pid: os.kill(pid, signal.SIGSTOP))
    verdict = diagnose(evidence)
    assert (verdict.kind, verdict.patient) == ("frozen", False), (verdict, evidence)


def test_waiting_for_children_that_work(look):
    evidence = look("import subprocess; subprocess.run([sys.executable, '-c', 'while True: pass'])")
    verdict = diagnose(evidence)
    assert (verdict.kind, verdict.patient) == ("syscall", True), (verdict, evidence)


def test_a_process_that_would_die_of_the_question_is_not_asked(tmp_path):
    popen = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    process = Process(popen, Board(), os.memfd_create("stack", 0), {})
    try:
        assert not stalls.ask_for_stack(process)
        evidence = aio.run(stalls.gather(process, lambda: None, lambda: False))
        assert evidence.stacks == ("", "")
        assert popen.poll() is None
    finally:
        process.kill()
        process.reap()
        process.close()


def test_death_and_its_cause_are_visible_before_the_memory_is_gone():
    code = "b = bytearray(200 << 20)\nfor i in range(0, len(b), 4096): b[i] = 1\nprint('up', flush=True)\ninput()"
    popen = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    popen.stdout.readline()
    fd = procfs.open_stat(popen.pid)
    try:
        assert procfs.glance(fd)[1] is False
        popen.kill()
        stat = wait_for(lambda: (found := procfs.read_stat(fd)) and found.is_exiting and found, "the mark", 5)
        assert stat.exit_code == -9
    finally:
        popen.kill()
        popen.communicate()
        os.close(fd)
