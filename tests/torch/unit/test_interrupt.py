"""The interrupt reaches a thread wherever it is, and nowhere else."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time

import pytest

from evertrain.torch.interrupt import Interrupted, Interrupter


@pytest.fixture
def interrupter():
    made = Interrupter()
    made.install()
    yield made
    made.acknowledge()
    made.uninstall()


def soon(action, delay=0.05) -> None:
    threading.Timer(delay, action).start()


def in_python() -> None:
    while True:
        pass


def in_sleep() -> None:
    time.sleep(30)


def in_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def in_queue() -> None:
    queue.Queue().get()


def in_except_exception() -> None:
    while True:
        try:
            time.sleep(30)
        except Exception:
            continue


def in_bare_except() -> None:
    for _ in range(3):
        try:
            time.sleep(30)
        except:  # noqa: E722
            continue
    time.sleep(30)


@pytest.mark.parametrize("place", [in_python, in_sleep, in_lock, in_queue, in_except_exception, in_bare_except])
def test_wakes_the_thread_wherever_it_is(interrupter: Interrupter, place) -> None:
    soon(interrupter.request)
    with pytest.raises(Interrupted):
        interrupter.arm()
        place()


def test_waits_behind_a_shield(interrupter: Interrupter) -> None:
    interrupter.arm()
    interrupter.raise_shield()
    asked = threading.Event()
    soon(lambda: (interrupter.request(), asked.set()))
    asked.wait()
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        pass  # the update goes on
    with pytest.raises(Interrupted):
        interrupter.lower_shield()


def test_does_nothing_outside_user_code(interrupter: Interrupter) -> None:
    interrupter.request()
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        pass
    with pytest.raises(Interrupted):
        interrupter.arm()


def test_is_over_once_acknowledged(interrupter: Interrupter) -> None:
    interrupter.request()
    interrupter.acknowledge()
    interrupter.arm()
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        pass
    interrupter.disarm()


def test_a_training_thread_that_is_not_the_main_one() -> None:
    code = """
import threading, time
from evertrain.torch.interrupt import Interrupted, Interrupter
made, out = Interrupter(), []
def train():
    made.install()
    made.arm()
    try:
        while True:
            time.sleep(0.001)
    except Interrupted:
        made.acknowledge()
        out.append("left")
thread = threading.Thread(target=train)
thread.start()
made.request()
thread.join(10)
print(*out)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "left", done.stderr


def test_a_fault_with_which_user_code_was_left_is_not_replaced(interrupter) -> None:
    """The request comes when the training thread is already on its way out."""

    def request(frame, event, _) -> None:
        if event == "call" and frame.f_code is Interrupter.disarm.__code__:
            sys.setprofile(None)
            interrupter.request()

    with pytest.raises(RuntimeError, match="UCE ERROR"):
        try:
            interrupter.arm()
            sys.setprofile(request)
            raise RuntimeError("UCE ERROR")
        finally:
            interrupter.disarm()
    assert interrupter.pending
