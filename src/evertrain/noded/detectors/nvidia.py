"""NVIDIA's GPUs: errors that the driver reports (Xid) and what it counts.

Xids come from the driver's library (NVML, if the Python package pynvml is there), else from the kernel's log; counters
from the library, else from `nvidia-smi`. The faults are ones of the node, with the GPU as device: pods of GPU jobs
carry no numbers of chips by which a fault could be laid at one pod's door. What was seen last stays while the driver
doesn't answer, as it may when a GPU fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from evertrain import aio
from evertrain.noded import codes
from evertrain.noded.detectors.base import Tell, aside, now_ms
from evertrain.noded.detectors.tool import PATIENCE, Tool
from evertrain.noded.faults import AnyFault, NodeFault

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 30.0
WAIT_MS = 1000
FAILURES = 3
"""In a row, before that is a fault."""
XID_LASTS_MS = 600_000
"""An error is an event, but what it says about the GPU is true for longer; resetting the GPU takes such time, too."""
GPU = "GPU"
FIELDS = (
    "index", "pci.bus_id", "ecc.errors.uncorrected.volatile.total", "remapped_rows.failure", "remapped_rows.pending",
)  # fmt: skip
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+)")


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    bus: str = ""
    uncorrected: int = 0
    remap_failed: bool = False
    remap_pending: bool = False


def bus_key(text: str) -> str:
    """`00000000:3B:00.0` and `0000:3b:00` are the same place."""
    domain, _, rest = text.lower().partition(":")
    if not re.fullmatch(r"[0-9a-f]+", domain):
        return text.lower()
    return f"{int(domain, 16):x}:{rest.partition('.')[0]}"


def parse_csv(text: str) -> list[Gpu]:
    """`nvidia-smi --query-gpu=… --format=csv,noheader,nounits`; what it doesn't know is [N/A]."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(FIELDS) and cells[0].isdecimal():
            count = int(cells[2]) if cells[2].isdecimal() else 0
            found.append(Gpu(int(cells[0]), cells[1], count, _true(cells[3]), _true(cells[4])))
    return found


def _true(cell: str) -> bool:
    return cell.lower() in ("yes", "1", "true")


def parse_xid(line: str) -> tuple[str, int] | None:
    """Place and number of an error in a line of the kernel's log."""
    match = _XID.search(line)
    return (match[1], int(match[2])) if match else None


class Gpus:
    """What is wrong with the GPUs. Pure."""

    def __init__(self) -> None:
        self._known: dict[int, Gpu] = {}
        self._now: dict[int, Gpu] = {}
        self._errors: dict[tuple[int, int], int] = {}

    def expect(self, indices: Iterable[int]) -> None:
        """The driver says that there are these. One that is not seen is lost, also if it never was."""
        self._known = {index: Gpu(index) for index in indices} | self._known

    def see(self, gpus: Iterable[Gpu]) -> None:
        self._now = {gpu.index: gpu for gpu in gpus}
        self._known |= self._now

    def index_at(self, bus: str) -> int:
        return next((gpu.index for gpu in self._known.values() if gpu.bus and bus_key(gpu.bus) == bus_key(bus)), 0)

    def error(self, index: int, xid: int, now: int) -> bool:
        """True if it is one that matters."""
        if xid not in codes.XID_LEVELS:
            return False
        self._errors[index, xid] = now
        return True

    def faults(self, now: int) -> list[NodeFault]:
        found = []
        for index in sorted(set(self._known) - set(self._now)):
            found.append(_fault(index, codes.GPU_LOST, now, "the driver no longer sees the GPU"))
        for gpu in self._now.values():
            if gpu.uncorrected:
                found.append(_fault(gpu.index, codes.GPU_MEMORY, now, f"{gpu.uncorrected} uncorrected memory errors"))
            if gpu.remap_failed:
                found.append(_fault(gpu.index, codes.GPU_REMAP_FAILED, now, "a row of its memory can't be remapped"))
            if gpu.remap_pending:
                found.append(_fault(gpu.index, codes.GPU_REMAP_PENDING, now, "memory is remapped at its next reset"))
        for (index, xid), since in sorted(self._errors.items()):
            until = since + XID_LASTS_MS
            if until > now:
                code, note = codes.xid_code(xid), f"Xid {xid}"
                found.append(NodeFault(code=code, device=GPU, id=index, since_ms=since, until_ms=until, note=note))
        return found


def _fault(index: int, code: str, now: int, note: str) -> NodeFault:
    return NodeFault(code=code, device=GPU, id=index, since_ms=now, note=note)


class Nvidia:
    name = "nvidia"

    def __init__(
        self,
        *,
        tool: str = "nvidia-smi",
        kmsg: Path = Path("/dev/kmsg"),
        every: float = POLL_SECONDS,
        nvml: bool = True,
    ) -> None:
        self._tool, self._kmsg, self._every, self._nvml = tool, kmsg, every, nvml
        self._gpus = Gpus()
        self._before: list[NodeFault] = []
        """What a noded before us has found: so it is until the driver answers."""
        self._failures = 0
        """Of the driver to answer, in a row."""

    def resume(self, faults: Iterable[AnyFault]) -> None:
        before = [fault for fault in faults if isinstance(fault, NodeFault) and fault.device == GPU]
        self._before = [fault for fault in before if fault.code != codes.GPU_DRIVER]
        self._failures = FAILURES if len(self._before) < len(before) else 0

    async def run(self, tell: Tell) -> None:
        """Ends at once where there are no GPUs of this kind."""
        tool = shutil.which(self._tool)
        if self._before or self._failures:  # it may take long to hear that they are over
            self._tell(tell)
        library = await self._answer(_load, tell) if self._nvml else None
        if library is not None:
            await self._with_library(library, tell)
        elif tool:
            await self._with_tool(Tool(tool), tell)
        else:
            tell([])

    def _tell(self, tell: Tell) -> None:
        faults = [*self._before, *self._gpus.faults(now_ms())]
        if self._failures >= FAILURES:
            faults.append(_fault(0, codes.GPU_DRIVER, now_ms(), "NVIDIA's driver doesn't answer"))
        tell(faults)

    def _see(self, gpus: list[Gpu]) -> None:
        self._gpus.see(gpus)
        self._before, self._failures = [], 0

    async def _with_tool(self, tool: Tool, tell: Tell) -> None:
        async with _lines_of(self._kmsg) as lines:
            while True:
                text = await tool.ask(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
                if text is None:
                    self._failures += 1
                else:
                    self._see(parse_csv(text))
                self._tell(tell)
                with contextlib.suppress(TimeoutError):
                    async with aio.timeout(self._every):
                        while True:
                            self._hear(await lines.get(), tell)

    def _hear(self, line: str, tell: Tell) -> None:
        if (error := parse_xid(line)) and self._gpus.error(self._gpus.index_at(error[0]), error[1], now_ms()):
            self._tell(tell)

    async def _answer(self, work: Callable[[], T], tell: Tell) -> T:
        """Of the driver. However long it takes: a call that hangs can only be waited for."""
        answer = aside(work, "NVML")
        while not (await asyncio.wait({answer}, timeout=PATIENCE))[0]:
            self._failures += 1
            self._tell(tell)
        try:
            return answer.result()
        except Exception:
            self._failures += 1
            self._tell(tell)
            raise

    async def _with_library(self, library: Any, tell: Tell) -> None:
        """NVML waits for events only in a thread of its own, which looks up once a second."""
        watch = await self._answer(partial(_Watch, library), tell)
        try:
            self._gpus.expect(watch.indices)
            while True:
                self._see(await self._answer(watch.counters, tell))
                self._tell(tell)
                end = asyncio.get_running_loop().time() + self._every
                while asyncio.get_running_loop().time() < end:
                    event = await self._answer(watch.wait, tell)
                    if event and self._gpus.error(*event, now_ms()):
                        self._tell(tell)
        finally:
            aside(watch.close, "NVML")


class _Watch:
    """The calls to NVML, which all block."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._set = library.nvmlEventSetCreate()
        self._handles: dict[int, Any] = {}
        self._places: dict[object, int] = {}
        """Indices by handle: the driver tells none of a GPU that is lost, and that is when it is asked for."""
        self.indices = [index for index in range(library.nvmlDeviceGetCount()) if self._find(index)]
        """Of the GPUs that we may see, lost or not."""

    def _find(self, index: int) -> bool:
        """False if the GPU is none of ours."""
        library = self._library
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
        except library.NVMLError as error:
            return "NoPermission" not in type(error).__name__
        self._handles[index] = handle
        self._places[_place(handle)] = index
        with contextlib.suppress(library.NVMLError):
            library.nvmlDeviceRegisterEvents(handle, library.nvmlEventTypeXidCriticalError, self._set)
        return True

    def counters(self) -> list[Gpu]:
        library, found = self._library, []
        for index in self.indices:
            if index not in self._handles:
                self._find(index)  # it may have come back
            handle = self._handles.get(index)
            if handle is None:
                continue
            try:
                bus = library.nvmlDeviceGetPciInfo(handle).busId
            except library.NVMLError:
                continue  # it has fallen off the bus
            count, failed, pending = 0, False, False
            with contextlib.suppress(library.NVMLError):
                kinds = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC
                count = library.nvmlDeviceGetTotalEccErrors(handle, *kinds)
            with contextlib.suppress(library.NVMLError, AttributeError):
                _, _, pending, failed = library.nvmlDeviceGetRemappedRows(handle)
            place = bus.decode() if isinstance(bus, bytes) else str(bus)
            found.append(Gpu(index, place, count, bool(failed), bool(pending)))
        return found

    def wait(self) -> tuple[int, int] | None:
        """GPU and number of the next error."""
        library = self._library
        try:
            event = library.nvmlEventSetWait_v2(self._set, WAIT_MS)
            index = self._places.get(_place(event.device))
            if index is None:
                index = library.nvmlDeviceGetIndex(event.device)
            return index, int(event.eventData)
        except library.NVMLError as error:
            if "Timeout" not in str(error) and "Timeout" not in type(error).__name__:
                time.sleep(WAIT_MS / 1000)
            return None

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._library.nvmlEventSetFree(self._set)
            self._library.nvmlShutdown()


def _place(handle: Any) -> object:
    """Handles are pointers, and each answer has an object of its own for them."""
    return handle if isinstance(handle, int) else ctypes.cast(handle, ctypes.c_void_p).value


def _load() -> Any:
    """NVML, or None where there is no such package or no such driver."""
    try:
        library = importlib.import_module("pynvml")
        library.nvmlInit()
    except Exception as error:  # its own errors can't be named before it is loaded
        logger.debug("no NVML: %s", error)
        return None
    return library


@contextlib.asynccontextmanager
async def _lines_of(kmsg: Path) -> Any:
    """New lines of the kernel's log, as a queue; without permission to read it, none come."""
    queue: asyncio.Queue[str] = asyncio.Queue(1000)
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        logger.info("the kernel's log can't be read: %s", error)
        yield queue
        return

    def ready() -> None:
        try:
            data = os.read(descriptor, 8192)
        except BlockingIOError:
            return
        except OSError:  # EPIPE: some lines were overwritten before we could read them
            return
        if not data:
            loop.remove_reader(descriptor)
        for line in data.decode(errors="replace").splitlines():
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait(line)

    try:
        with contextlib.suppress(OSError):
            os.lseek(descriptor, 0, os.SEEK_END)  # only what comes now
        loop.add_reader(descriptor, ready)
        yield queue
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
