"""A program that does what its arguments say, one after the other, and mostly dies of it."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading

LIBC = ctypes.CDLL(None, use_errno=True)
RT_TGSIGQUEUEINFO = {"x86_64": 297, "aarch64": 240}[os.uname().machine]
UNDEFINED = {"x86_64": b"\x0f\x0b", "aarch64": b"\0\0\0\0"}[os.uname().machine]
# A call of itself; a push and a jump back to it. Python's own recursion ends in an exception since 3.12.
ENDLESS = {"x86_64": b"\xe8\xfb\xff\xff\xff", "aarch64": b"\xfd\x7b\xbf\xa9\xff\xff\xff\x17"}[os.uname().machine]


class SigInfo(ctypes.Structure):
    _fields_ = [
        ("si_signo", ctypes.c_int),
        ("si_errno", ctypes.c_int),
        ("si_code", ctypes.c_int),
        ("si_addr", ctypes.c_void_p),
        ("rest", ctypes.c_char * 128),
    ]


def fault(number: int, code: int, address: int = 0x1000) -> None:
    """A fault as the kernel reports it: only a process itself may make up such a signal."""
    info = SigInfo(number, 0, code, address)
    done = LIBC.syscall(RT_TGSIGQUEUEINFO, os.getpid(), threading.get_native_id(), number, ctypes.byref(info))
    assert done == 0, os.strerror(ctypes.get_errno())


def touch(address: int = 8) -> None:
    LIBC.memset(ctypes.c_void_p(address), 0, ctypes.c_size_t(1))  # outside of the GIL


def touch_lost_page() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(2 * mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), 0)
        file.truncate(mmap.PAGESIZE)
        mapped[mmap.PAGESIZE]


def run(code: bytes) -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()


def in_thread() -> None:
    def run() -> None:
        print(threading.get_native_id(), flush=True)
        touch()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def in_two_threads() -> None:
    ready = threading.Barrier(2)

    def run() -> None:
        ready.wait()
        touch()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_fork() -> None:
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        print(child, os.waitstatus_to_exitcode(status))
    else:
        touch()


def in_program() -> None:
    program = subprocess.Popen([sys.executable, "-I", "-S", __file__, "segv"])
    print(program.pid, program.wait())


def handled(number: int) -> None:
    signal.signal(number, lambda number, frame: print("lived through", number, flush=True))


WAYS = {
    "segv": touch,
    "bus": touch_lost_page,
    "ill": lambda: run(UNDEFINED),
    "divided": lambda: fault(signal.SIGFPE, 1),
    "memory-error": lambda: fault(signal.SIGBUS, 4, 0x7F0000001000),
    "memory-error-found": lambda: fault(signal.SIGBUS, 5, 0x7F0000001000),
    "abort": os.abort,
    "kill-abrt": lambda: os.kill(os.getpid(), signal.SIGABRT),
    "overflow": lambda: run(ENDLESS),
    "thread": in_thread,
    "two-threads": in_two_threads,
    "fork": in_fork,
    "program": in_program,
    "faulthandler": faulthandler.enable,
    "no-faulthandler": faulthandler.disable,
    "handle-abrt": lambda: handled(signal.SIGABRT),
    "ignore-abrt": lambda: signal.signal(signal.SIGABRT, signal.SIG_IGN),
    "load": lambda: ctypes.CDLL(os.environ["LIBRARY"], mode=ctypes.RTLD_GLOBAL),  # for those who look in LIBC
    "arm": lambda: print("armed", LIBC.taskd_crash_arm(), flush=True),
    "step": lambda: LIBC.taskd_set_step(ctypes.c_int64(12)),
    "steps": lambda: [LIBC.taskd_set_step(ctypes.c_int64(step)) for step in range(-300, 13)],
    "chdir": lambda: os.chdir("/"),
}

if __name__ == "__main__":
    for way in sys.argv[1:]:
        WAYS[way]()
    print("alive", flush=True)
