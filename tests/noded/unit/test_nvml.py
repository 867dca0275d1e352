"""NVIDIA's library where a GPU is lost: neither does that hide the others, nor is what became of it swallowed."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from typing import Any

import pytest

from evertrain import aio
from evertrain.noded import codes
from evertrain.noded.detectors import nvidia


class NVMLError(Exception):
    pass


class NVMLErrorGpuIsLost(NVMLError):
    pass


class NVMLErrorNoPermission(NVMLError):
    pass


class Event:
    def __init__(self, device: Any, xid: int) -> None:
        self.device, self.eventData = device, xid


class Pynvml:
    """What of it is asked. Handles are pointers, as there; each answer has a new object for them."""

    NVMLError = NVMLError
    nvmlEventTypeXidCriticalError, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 8, 1, 0

    def __init__(self, gpus: int = 3) -> None:
        self.memory = (ctypes.c_int * gpus)()
        self.lost: set[int] = set()
        self.foreign: set[int] = set()
        self.registered: list[int] = []
        self.events: list[Event] = []

    def pointer(self, index: int) -> Any:
        return ctypes.pointer(ctypes.c_int.from_buffer(self.memory, index * ctypes.sizeof(ctypes.c_int)))

    def index(self, handle: Any) -> int:
        first = ctypes.addressof(self.memory)
        return (ctypes.addressof(handle.contents) - first) // ctypes.sizeof(ctypes.c_int)

    def check(self, handle: Any) -> int:
        if self.index(handle) in self.lost:
            raise NVMLErrorGpuIsLost("GPU is lost")
        return self.index(handle)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.memory)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if index in self.foreign:
            raise NVMLErrorNoPermission("Insufficient Permissions")
        self.check(self.pointer(index))
        return self.pointer(index)

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlEventSetFree(self, events: object) -> None:
        pass

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceRegisterEvents(self, handle: Any, kinds: int, events: object) -> None:
        self.registered.append(self.check(handle))

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        class Place:
            busId = f"0000:{self.check(handle)}b:00.0".encode()

        return Place

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, *kind: int) -> int:
        return 3 if self.check(handle) == 0 else 0

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> tuple[int, int, int, int]:
        self.check(handle)
        return 0, 0, 0, 0

    def nvmlDeviceGetIndex(self, handle: Any) -> int:
        return self.check(handle)

    def nvmlEventSetWait_v2(self, events: object, milliseconds: int) -> Event:
        if self.events:
            return self.events.pop(0)
        raise NVMLError("Timeout")


MEMORY_OF_0 = (codes.GPU_MEMORY, 0)


def known(gpus: nvidia.Gpus) -> list[tuple[str, int]]:
    return [(fault.code, fault.id) for fault in gpus.faults(0)]


def test_a_gpu_that_is_lost_when_noded_starts_hides_no_other_and_may_come_back() -> None:
    library, gpus = Pynvml(), nvidia.Gpus()
    library.lost.add(1)
    watch = nvidia._Watch(library)
    gpus.expect(watch.indices)
    gpus.see(watch.counters())
    assert sorted(known(gpus)) == [(codes.GPU_LOST, 1), MEMORY_OF_0]
    assert library.registered == [0, 2]
    library.lost.clear()
    gpus.see(watch.counters())
    assert known(gpus) == [MEMORY_OF_0] and library.registered == [0, 2, 1]


def test_the_error_of_a_gpu_that_is_lost_is_told() -> None:
    library = Pynvml()
    watch = nvidia._Watch(library)
    library.lost.add(1)
    library.events += [Event(library.pointer(1), 79), Event(library.pointer(2), 48)]
    assert [watch.wait(), watch.wait()] == [(1, 79), (2, 48)]


def test_a_gpu_that_is_none_of_ours_is_not_missed() -> None:
    library, gpus = Pynvml(), nvidia.Gpus()
    library.foreign.add(2)
    watch = nvidia._Watch(library)
    gpus.expect(watch.indices)
    gpus.see(watch.counters())
    assert known(gpus) == [MEMORY_OF_0]


async def test_the_detector_tells_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Pynvml()
    library.lost.add(2)
    monkeypatch.setattr(nvidia, "_load", lambda: library)
    told: list[set[str]] = []
    enough = asyncio.Event()

    def tell(faults: Any) -> None:
        told.append({fault.code for fault in faults})
        library.lost.add(1)
        library.events.append(Event(library.pointer(1), 79))
        if codes.xid_code(79) in told[-1]:
            enough.set()

    running = asyncio.ensure_future(nvidia.Nvidia(every=60).run(tell))
    try:
        async with aio.timeout(60):
            await asyncio.wait({running, asyncio.ensure_future(enough.wait())}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert told[0] == {codes.GPU_LOST, codes.GPU_MEMORY} and enough.is_set()


async def test_a_driver_that_hangs_is_a_fault_and_takes_none_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it keep the process from ending."""
    library, answers = Pynvml(), threading.Event()
    answers.set()
    rows = library.nvmlDeviceGetRemappedRows

    def hang(handle: Any) -> tuple[int, int, int, int]:
        answers.wait(60)
        return rows(handle)

    monkeypatch.setattr(library, "nvmlDeviceGetRemappedRows", hang)
    monkeypatch.setattr(nvidia, "_load", lambda: library)
    monkeypatch.setattr(nvidia, "PATIENCE", 0.05)
    told: asyncio.Queue[list[tuple[str, int]]] = asyncio.Queue()
    detector = nvidia.Nvidia(every=0)
    running = asyncio.ensure_future(
        detector.run(lambda faults: told.put_nowait([(fault.code, fault.key[2]) for fault in faults]))  # type: ignore[misc]
    )
    try:
        async with aio.timeout(60):
            assert await told.get() == [MEMORY_OF_0]
            answers.clear()
            while (now := await told.get()) == [MEMORY_OF_0]:
                pass
            assert now == [MEMORY_OF_0, (codes.GPU_DRIVER, 0)]
            answers.set()
            while (now := await told.get()) != [MEMORY_OF_0]:
                pass
    finally:
        answers.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_thread_that_hangs_keeps_no_process_alive() -> None:
    code = (
        "import threading\n"
        "from evertrain import aio\n"
        "from evertrain.noded.detectors.base import aside\n"
        "async def main(): aside(threading.Event().wait, 'hangs')\n"
        "aio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    try:
        async with aio.timeout(60):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("detector", "code", "of_node", "may"),
    [
        ("nvidia", codes.GPU_LOST, True, True),
        ("nvidia", codes.GPU_DRIVER, True, True),
        ("nvidia", codes.xid_code(79), True, True),
        ("nvidia", codes.LINK_DOWN, True, False),
        ("nvidia", "81078603", False, False),
        ("ascend", "81078603", False, True),
        ("ascend", codes.NPU_TOOL, True, True),
        ("programs", "E8000001", True, True),
        ("programs", "00000007", True, True),
        ("programs", codes.GPU_LOST, True, False),
        ("of a user", codes.GPU_LOST, True, True),
    ],
)
def test_who_could_have_found_it(detector: str, code: str, of_node: bool, may: bool) -> None:
    assert codes.may_tell(detector, code, of_node=of_node) == may
