"""What detectors make of what they have read, and that they read what the kernel writes."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evertrain import aio
from evertrain.noded import codes
from evertrain.noded.detectors import ascend, clock, links, memory, netlink, nvidia, pressure, storage, tool
from evertrain.noded.detectors.base import Detector
from evertrain.noded.detectors.links import FLAP_CALM_MS, LinkStates
from evertrain.noded.detectors.memory import Count, MemoryErrors, Rates
from evertrain.noded.detectors.netlink import Link
from evertrain.noded.detectors.storage import Mount, Mounts
from evertrain.noded.faults import AnyFault, ChipFault, NodeFault
from tests import virtual_time


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def found(faults: Any) -> list[tuple[str, int]]:
    return [(fault.code, fault.id) for fault in faults]


async def seen(detector: Detector, condition: Callable[[list[AnyFault]], Any], then: Any = None) -> list[AnyFault]:
    """Runs a detector until what it tells meets the condition; with `then` once more."""
    told: asyncio.Queue[list[AnyFault]] = asyncio.Queue()
    task = asyncio.create_task(detector.run(lambda faults: told.put_nowait(list(faults))))
    try:
        async with aio.timeout(30):
            while True:
                faults = await told.get()
                if condition(faults):
                    if then is None:
                        return faults
                    then()
                    condition, then = (lambda now, before=faults: now != before), None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- links


def up(name: str = "eth0", index: int = 2) -> Link:
    return Link(index, name, True, True)


def down(name: str = "eth0", index: int = 2) -> Link:
    return Link(index, name, True, False)


def test_a_link_that_worked_is_missed_and_one_that_never_did_is_not() -> None:
    states = LinkStates()
    states.change(down(), 1)
    assert states.faults(1) == []
    states.change(up(), 2)
    states.change(down(), 3)
    (fault,) = states.faults(4)
    assert fault == NodeFault(code=codes.LINK_DOWN, device="Network", id=2, since_ms=3, note="eth0 has no carrier")
    states.change(Link(2, "eth0", False, False), 5)
    assert states.faults(5)[0].since_ms == 3 and "switched off" in states.faults(5)[0].note
    states.change(up(), 6)
    assert states.faults(6) == []
    states.gone("eth0", 7)
    assert "is not there" in states.faults(7)[0].note


def test_a_link_that_was_named_has_to_work() -> None:
    states = LinkStates(["eth0", "eth9"])
    states.see([down()], 1)
    assert [fault.note for fault in states.faults(1)] == ["eth0 has no carrier", "eth9 is not there"]


def test_a_renamed_link_is_not_missed() -> None:
    states = LinkStates()
    states.change(up("eth0"), 1)
    states.change(up("lan0"), 2)
    assert states.faults(3) == []


def test_a_link_that_flaps_is_reported_until_it_is_calm() -> None:
    states = LinkStates()
    for moment in range(5):
        states.change(up(), moment * 1000)
        assert states.calm_ms(moment * 1000) is None
        states.change(down(), moment * 1000 + 500)
    states.change(up(), 5000)
    assert found(states.faults(5000)) == [(codes.LINK_FLAPS, 2)]
    calm = states.calm_ms(5000)
    assert calm == 4500 + FLAP_CALM_MS
    assert states.faults(calm - 1) and not states.faults(calm)


def test_what_a_noded_before_us_has_missed_is_missed_still() -> None:
    """We never saw it work."""
    watching = links.Links()
    watching.resume([NodeFault(code=codes.LINK_DOWN, device="Network", id=2, since_ms=1)])
    watching._states.change(down(), 5)
    assert found(watching._states.faults(5)) == [(codes.LINK_DOWN, 2)]
    watching._states.change(up(), 6)
    assert watching._states.faults(6) == []
    disks = storage.Storage()
    disks.resume([NodeFault(code=codes.READ_ONLY, device="Storage", id=mount().id, since_ms=1)])
    assert found(disks._mounts.faults([mount(True)])) == [(codes.READ_ONLY, mount().id)]


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def message(kind: int, index: int, flags: int, *attributes: bytes) -> bytes:
    body = struct.pack("=BxHiII", 0, 1, index, flags, 0) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 1, 0) + body


def test_what_the_kernel_says_about_links() -> None:
    data = message(16, 2, 0x10001, attribute(3, b"eth0\0"), attribute(33, b"\0")) + message(
        17, 3, 8, attribute(3, b"lo\0")
    )
    data += struct.pack("=IHHII", 20, 3, 0, 1, 0) + b"\0" * 4
    messages, complete = netlink.parse(data)
    assert complete
    assert [(m.link, m.gone) for m in messages] == [
        (Link(2, "eth0", True, False), False),
        (Link(3, "lo", False, False, loopback=True), True),
    ]
    assert netlink.parse(message(16, 2, 0x10001, attribute(3, b"eth0\0")))[0][0].link.works
    for end in range(len(data)):
        netlink.parse(data[:end])
    assert netlink.parse(b"\xff" * 64) == ([], False)


async def test_links_are_read_from_sys_where_the_kernel_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "POLL_SECONDS", 0.01)
    net = "class/net"
    tree(tmp_path, {f"{net}/eth0/flags": "0x1003", f"{net}/eth0/carrier": "1", f"{net}/eth0/ifindex": "2"})
    tree(tmp_path, {f"{net}/eth0/device/x": "", f"{net}/lo/flags": "0x9", f"{net}/veth1/flags": "0x1003"})
    detector = links.Links(sys=tmp_path, netlink=False)
    faults = await seen(detector, lambda told: told == [], lambda: (tmp_path / net / "eth0/carrier").write_text("0"))
    assert found(faults) == [(codes.LINK_DOWN, 2)], "eth0 is hardware, veth1 is not"


# --- memory


def test_edac_counters_are_read_by_module(tmp_path: Path) -> None:
    mc = "devices/system/edac/mc"
    tree(tmp_path, {f"{mc}/mc0/ce_count": "7", f"{mc}/mc0/ue_count": "1", f"{mc}/mc0/dimm3/dimm_ce_count": "5"})
    tree(tmp_path, {f"{mc}/mc0/dimm3/dimm_label": "CPU0_DIMM_A1", f"{mc}/mc1/rank0/dimm_ue_count": "2"})
    tree(tmp_path, {f"{mc}/mc1/ue_count": "2", f"{mc}/mc1/ce_count": "junk"})
    assert memory.read_counts(tmp_path) == {
        3: Count(5, 0, "CPU0_DIMM_A1"),
        999: Count(2, 1, "mc0"),
        1000: Count(0, 2, "rank0"),
        1999: Count(0, 0, "mc1"),
    }
    assert memory.read_counts(tmp_path / "nowhere") == {}


def test_many_corrected_errors_in_an_hour_are_a_fault_and_old_ones_are_not() -> None:
    rates = Rates(most=10, window_ms=3600)
    assert rates.faults({1: Count(5000, 0)}, 0) == [], "who knows when those were"
    assert rates.faults({1: Count(5009, 0)}, 100) == []
    assert found(rates.faults({1: Count(5010, 0)}, 200)) == [(codes.MEMORY_CORRECTED, 1)]
    assert rates.faults({1: Count(5010, 0)}, 200 + 3601) == []
    assert rates.faults({1: Count(3, 0)}, 9000) == [], "the counter was reset"
    assert found(rates.faults({1: Count(13, 1)}, 9001)) == [(codes.MEMORY_UNCORRECTED, 1), (codes.MEMORY_CORRECTED, 1)]


async def test_an_uncorrected_error_is_seen_when_it_happens(tmp_path: Path) -> None:
    count = tmp_path / "devices/system/edac/mc/mc0/dimm0/dimm_ue_count"
    tree(tmp_path, {str(count.relative_to(tmp_path)): "0"})
    faults = await seen(MemoryErrors(tmp_path, every=0.01), lambda told: told == [], lambda: count.write_text("1"))
    assert found(faults) == [(codes.MEMORY_UNCORRECTED, 0)]
    async with aio.timeout(10):
        await MemoryErrors(tmp_path / "nowhere").run(lambda faults: None)


# --- storage

MOUNTINFO = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/root rw,errors=remount-ro
25 22 0:24 / /proc rw - proc proc rw
30 22 254:2 / /data\\040two rw,relatime - xfs /dev/vdb ro
31 22 7:1 / /snap ro - squashfs /dev/loop1 ro
junk
"""


def test_mounts_are_read_as_the_kernel_writes_them() -> None:
    assert storage.parse_mounts(MOUNTINFO) == [
        Mount("254:1", "/", False, "/dev/root"),
        Mount("0:24", "/proc", False, "proc"),
        Mount("254:2", "/data two", True, "/dev/vdb"),
        Mount("7:1", "/snap", True, "/dev/loop1"),
    ]
    assert storage.parse_mounts(Path("/proc/self/mountinfo").read_text()), "those of this machine, too"


def mount(read_only: bool = False, place: str = "/data", source: str = "/dev/vdb", device: str = "254:2") -> Mount:
    return Mount(device, place, read_only, source)


def test_what_became_read_only_is_a_fault_and_what_always_was_is_not() -> None:
    mounts = Mounts()
    assert mounts.faults([mount(True)]) == []
    assert mounts.faults([mount(False)]) == []
    (fault,) = mounts.faults([mount(True), mount(True, "/also")])
    assert (fault.code, fault.id, fault.note) == (codes.READ_ONLY, 254 << 20 | 2, "/data can only be read")
    assert mounts.faults([mount(False)]) == []
    assert mounts.faults([]) == [], "unmounted"
    assert not Mounts().watched([mount(source="tmpfs")])
    assert Mounts(["/data"]).faults([mount(True)]), "one that was named has to be writable"
    assert not Mounts(["/other"]).watched([mount()])


def test_full_is_full_until_it_is_much_emptier() -> None:
    one = mount()
    assert not storage.full([one], {"/data": 0.97}, [])
    assert storage.full([one], {"/data": 0.98}, [])
    assert storage.full([one], {"/data": 0.96}, ["/data"])
    assert not storage.full([one], {"/data": 0.94}, ["/data"])
    assert not storage.full([one], {}, ["/data"])


async def test_errors_of_ext4_are_seen(tmp_path: Path) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text("22 1 254:1 / / rw - ext4 /dev/vda1 rw\n")
    count = tmp_path / "fs/ext4/vda1/errors_count"
    tree(tmp_path, {str(count.relative_to(tmp_path)): "0", "fs/ext4/features/x": ""})
    detector = storage.Storage(sys=tmp_path, mountinfo=mountinfo, every=0.01)
    faults = await seen(
        detector,
        lambda told: all(f.code != codes.FILE_SYSTEM_ERRORS for f in told),
        lambda: count.write_text("3"),
    )
    assert (codes.FILE_SYSTEM_ERRORS, 254 << 20 | 1) in found(faults)


async def test_a_disk_that_hangs_silences_nothing_and_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mountinfo, answers, asked = tmp_path / "mountinfo", threading.Event(), list[str]()
    mountinfo.write_text("22 1 254:1 / /a ro - ext4 /dev/vda1 ro\n23 1 254:2 / /b rw - xfs /dev/vdb rw\n")
    a, b = 254 << 20 | 1, 254 << 20 | 2

    def usage(place: Path) -> float:
        asked.append(place.name)
        if place.name == "b":
            answers.wait(60)
        return 0.99

    monkeypatch.setattr(storage, "read_usage", usage)
    monkeypatch.setattr(storage, "PATIENCE", 60)
    detector = storage.Storage(sys=tmp_path, mountinfo=mountinfo, every=0.01)
    detector.resume([NodeFault(code=codes.READ_ONLY, device="Storage", id=a, since_ms=1)])
    try:
        assert found(await seen(detector, lambda told: True)) == [(codes.READ_ONLY, a)], "at once"
        monkeypatch.setattr(storage, "PATIENCE", 0.1)
        faults = await seen(detector, lambda told: len(told) > 2)
        assert found(faults) == [(codes.READ_ONLY, a), (codes.DISK_FULL, a), (codes.DISK_HANGS, b)]
        await seen(detector, lambda told: asked.count("a") > 3)
        assert asked.count("b") == 1, "one at most waits for it"
    finally:
        answers.set()
    faults = await seen(detector, lambda told: (codes.DISK_HANGS, b) not in found(told))
    assert found(faults) == [(codes.READ_ONLY, a), (codes.DISK_FULL, a), (codes.DISK_FULL, b)]


async def test_what_is_full_stays_so_until_it_has_been_asked_again(tmp_path: Path) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text("22 1 254:1 / / rw - ext4 /dev/vda1 rw\n")
    detector = storage.Storage(sys=tmp_path, mountinfo=mountinfo, every=0.01)
    detector.resume([NodeFault(code=codes.DISK_FULL, device="Storage", id=mount().id, since_ms=1)])
    assert found(await seen(detector, lambda told: True)) == [(codes.DISK_FULL, mount().id)]


# --- pressure

PRESSURE = "some avg10=90.00 avg60=1.00 avg300=0.10 total=1\nfull avg10={} avg60=0.00 avg300=0.00 total=0\n"


def test_pressure_is_read_as_the_kernel_writes_it() -> None:
    assert pressure.parse_stalled(PRESSURE.format("15.30")) == 15.3
    assert pressure.parse_stalled("") is None
    assert pressure.parse_tasks("0.00 0.01 0.05 1/322 9876") == 322
    assert pressure.parse_tasks("junk") is None
    assert pressure.parse_meminfo("MemTotal:  100 kB\nMemAvailable:   3 kB\n") == {"MemTotal": 100, "MemAvailable": 3}


def test_what_is_short() -> None:
    assert pressure.short_of_memory(15.0, {}, False) and not pressure.short_of_memory(14.9, {}, False)
    assert pressure.short_of_memory(10.0, {}, True) and not pressure.short_of_memory(7.0, {}, True)
    low = {"MemTotal": 1000, "MemAvailable": 19}
    assert pressure.short_of_memory(None, low, False)
    assert not pressure.short_of_memory(None, low | {"MemAvailable": 30}, False)
    assert pressure.short_of_memory(None, low | {"MemAvailable": 30}, True)
    assert not pressure.short_of_memory(None, {}, False)
    assert pressure.short_of_pids(90, 100, False) and not pressure.short_of_pids(89, 100, False)
    assert pressure.short_of_pids(85, 100, True) and not pressure.short_of_pids(79, 100, True)
    assert not pressure.short_of_pids(None, 100, False) and not pressure.short_of_pids(5, None, False)


async def test_pressure_is_seen_in_files_that_can_not_tell(tmp_path: Path) -> None:
    tree(tmp_path, {"pressure/memory": PRESSURE.format("0.00"), "loadavg": "0 0 0 1/950 7"})
    tree(tmp_path, {"sys/kernel/pid_max": "32768", "sys/kernel/threads-max": "1000"})

    def get_worse() -> None:
        (tmp_path / "pressure/memory").write_text(PRESSURE.format("60.00"))

    faults = await seen(
        pressure.Pressure(tmp_path, every=0.01), lambda told: found(told) == [(codes.PID_PRESSURE, 0)], get_worse
    )
    assert found(faults) == [(codes.MEMORY_PRESSURE, 0), (codes.PID_PRESSURE, 0)]


class Kernel:
    """Stands for files that tell: it tells when it is told to."""

    def __init__(self) -> None:
        self.tells, self.closed = asyncio.Event(), False

    def add(self, descriptor: int) -> None:
        os.close(descriptor)

    async def wait(self, seconds: float) -> bool:
        try:
            async with aio.timeout(seconds):
                await self.tells.wait()
        except TimeoutError:
            return False
        self.tells.clear()
        return True

    def close(self) -> None:
        self.closed = True


def test_pressure_lasts_until_the_kernel_has_not_told_of_it_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path, {"pressure/memory": "", "loadavg": "0 0 0 1/9 7"})

    async def test() -> None:
        kernel, loop, told = Kernel(), asyncio.get_running_loop(), list[tuple[float, list[tuple[str, int]]]]()
        monkeypatch.setattr(pressure, "Changes", lambda: kernel)
        watched = pressure.Pressure(tmp_path, every=10.0, calm=30.0)
        task = asyncio.create_task(watched.run(lambda faults: told.append((loop.time(), found(faults)))))
        for seconds in (1, 15):
            await asyncio.sleep(seconds)
            kernel.tells.set()
        await asyncio.sleep(100)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [now for now, faults in told if faults == [(codes.MEMORY_PRESSURE, 0)]] == [1, 11, 16, 26, 36]
        assert [now for now, faults in told if not faults][:3] == [0, 46, 56]
        assert kernel.closed

    virtual_time.run(test())
    assert (tmp_path / "pressure/memory").read_bytes() == b"full 1500000 10000000\0"


# --- clock


def test_a_jump_of_the_clock_is_an_event() -> None:
    jump = clock.fault(100.0, 103.5, 5000)
    assert jump is not None
    assert (jump.code, jump.since_ms, jump.until_ms) == (codes.CLOCK_JUMP, 5000, 65_000)
    assert jump.note == "the clock was set forward by 3.5 s"
    back = clock.fault(100.0, 40.0, 0)
    assert back is not None and "back by 60.0 s" in back.note
    assert clock.fault(100.0, 100.9, 0) is None


async def test_the_clock_is_looked_at_when_the_kernel_says_that_it_was_set() -> None:
    offsets = [100.0, 100.2, 160.0]
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    with os.fdopen(theirs, "wb", buffering=0) as said:

        def settle() -> None:
            said.write(b"12345678")

        detector = clock.Clock(offset=lambda: offsets.pop(0) if len(offsets) > 1 else offsets[0], timer=lambda: ours)
        task = asyncio.create_task(seen(detector, lambda told: told == [], settle))
        async with aio.timeout(30):
            while len(offsets) > 1:
                await asyncio.sleep(0.01)
            assert not task.done(), "a small correction is no jump"
            said.write(b"12345678")
            faults = await task
    assert faults[0].note == "the clock was set forward by 59.8 s"


def test_the_kernel_gives_us_the_timer() -> None:
    descriptor = clock.open_timer()
    try:
        with pytest.raises(BlockingIOError):
            os.read(descriptor, 8)
    finally:
        os.close(descriptor)
    assert abs(clock.offset() - clock.offset()) < 0.5


# --- NVIDIA


def test_gpus_are_read_from_nvidia_smi() -> None:
    text = "0, 00000000:3B:00.0, 0, No, No\n1, 00000000:AF:00.0, 4, Yes, [N/A]\njunk\n2, x, [N/A], No, Yes\n"
    gpus = nvidia.Gpus()
    gpus.see(nvidia.parse_csv(text))
    assert found(gpus.faults(0)) == [(codes.GPU_MEMORY, 1), (codes.GPU_REMAP_FAILED, 1), (codes.GPU_REMAP_PENDING, 2)]
    gpus.see(nvidia.parse_csv(text.splitlines()[0]))
    assert found(gpus.faults(0)) == [(codes.GPU_LOST, 1), (codes.GPU_LOST, 2)]
    assert gpus.index_at("0000:af:00") == 1


def test_errors_of_the_driver_are_read_from_the_kernel_s_log() -> None:
    line = "3,1234,5678,-;NVRM: Xid (PCI:0000:af:00): 79, pid=1, GPU has fallen off the bus."
    assert nvidia.parse_xid(line) == ("0000:af:00", 79)
    assert nvidia.parse_xid("NVRM: loading") is None
    gpus = nvidia.Gpus()
    assert gpus.error(1, 79, 1000) and not gpus.error(1, 12345, 1000)
    assert found(gpus.faults(1000)) == [("E600004F", 1)]
    assert gpus.faults(1000 + nvidia.XID_LASTS_MS) == []


async def test_a_machine_with_nvidia_smi(tmp_path: Path) -> None:
    """A tool that says what the real one says, and a log of the kernel into which we write."""
    tool, log = tmp_path / "nvidia-smi", tmp_path / "kmsg"
    tool.write_text('#!/bin/sh\necho "3, 00000000:AF:00.0, 0, No, No"\n')
    tool.chmod(0o755)
    os.mkfifo(log)
    writer = os.open(log, os.O_RDWR)
    try:
        line = b"3,1,2,-;NVRM: Xid (PCI:0000:af:00): 48, pid=1\n"
        detector = nvidia.Nvidia(tool=str(tool), kmsg=log, nvml=False)
        faults = await seen(detector, lambda told: told == [], lambda: os.write(writer, line))
    finally:
        os.close(writer)
    assert found(faults) == [(codes.xid_code(48), 3)]


async def test_an_nvidia_smi_that_no_longer_answers_is_a_fault_and_takes_none_back(tmp_path: Path) -> None:
    tool, says = tmp_path / "nvidia-smi", tmp_path / "says"
    tool.write_text(f"#!/bin/sh\nexec cat {says}\n")
    tool.chmod(0o755)
    says.write_text("3, 00000000:AF:00.0, 2, No, No\n")
    detector = nvidia.Nvidia(tool=str(tool), kmsg=tmp_path / "none", nvml=False, every=0.01)
    assert found(await seen(detector, lambda told: True)) == [(codes.GPU_MEMORY, 3)]
    says.unlink()
    faults = await seen(detector, lambda told: found(told) != [(codes.GPU_MEMORY, 3)])
    assert found(faults) == [(codes.GPU_MEMORY, 3), (codes.GPU_DRIVER, 0)]
    other = nvidia.Nvidia(tool=str(tool), kmsg=tmp_path / "none", nvml=False, every=0.01)
    other.resume(faults)
    told = await seen(other, lambda told: True)
    assert found(told) == [(codes.GPU_MEMORY, 3), (codes.GPU_DRIVER, 0)]
    says.write_text("3, 00000000:AF:00.0, 0, No, No\n")
    for each in (detector, other):
        assert await seen(each, lambda told: not told) == []


async def test_machines_without_such_hardware_have_nothing_to_look_at(tmp_path: Path) -> None:
    async with aio.timeout(10):
        await nvidia.Nvidia(tool=str(tmp_path / "none"), nvml=False).run(lambda faults: None)
        await ascend.Ascend(tool=str(tmp_path / "none")).run(lambda faults: None)


# --- Ascend

LIST = """\
	Total Count                    : 2

	NPU ID                         : 0
	Product Name                   : xxx
	Chip Count                     : 2

	NPU ID                         : 5
	Chip Count                     : 1
"""
HEALTH = """\
	Health Status                  : Alarm
	Error Code                     : 80E01801 0x81078603
	Error Information              : on-chip memory: double bit
	NPU ID                         : 0
	Chip ID                        : 0

	Health Status                  : OK
	Error Code                     : NA
	NPU ID                         : 0
	Chip ID                        : 1
"""


def test_npu_smi_is_read() -> None:
    assert ascend.parse_list(LIST) == [(0, 2), (5, 1)]
    assert ascend.parse_health(HEALTH) == [
        ascend.Health(0, "Alarm", ("80E01801", "81078603")),
        ascend.Health(1, "OK"),
    ]
    assert ascend.parse_health("junk") == []


async def test_a_machine_with_npu_smi(tmp_path: Path) -> None:
    tool = tmp_path / "npu-smi"
    (tmp_path / "list").write_text(LIST)
    (tmp_path / "health").write_text(HEALTH)
    (tmp_path / "one").write_text("Health : Warning\nError Code : A8028801\n")
    tool.write_text(
        f'#!/bin/sh\ncd {tmp_path}\ncase "$*" in "info -l") cat list;; "info -t health -i 0") cat health;;\n'
        '"info -t health -i 5") cat one;; *) exit 1;; esac\n'
    )
    tool.chmod(0o755)
    faults = await seen(ascend.Ascend(tool=str(tool)), lambda told: True)
    assert [(fault.chip, fault.code) for fault in faults if isinstance(fault, ChipFault)] == [
        (0, "80E01801"),
        (0, "81078603"),
        (2, "A8028801"),
    ]


def on_cards(faults: list[ChipFault]) -> list[tuple[int, str]]:
    return sorted((fault.chip, fault.code) for fault in faults)


def test_a_card_that_is_missing_is_a_fault_of_its_chips_and_shifts_no_other() -> None:
    cards = ascend.Cards()
    assert cards.listed([(0, 2), (5, 1), (6, 1)]) == [0, 5, 6]
    cards.hear(0, [ascend.Health(0, "OK"), ascend.Health(1, "OK")])
    cards.hear(6, [ascend.Health(0, "Alarm", ("80E01801",))])
    assert on_cards(cards.faults(0)) == [(3, "80E01801")]
    assert cards.listed([(5, 1), (6, 1)]) == [5, 6]
    assert on_cards(cards.faults(0)) == [(0, ascend.CARD_DROP), (1, ascend.CARD_DROP), (3, "80E01801")]
    assert cards.listed([(0, 2), (5, 1), (6, 1)]) == [0, 5, 6]
    assert on_cards(cards.faults(0)) == [(3, "80E01801")]
    assert cards.listed([(0, 2), (4, 1), (6, 1)]) == [0, 4, 6], "another card in its place"
    assert on_cards(cards.faults(0)) == [(3, "80E01801")]
    cards.listed([(0, 2), (1, 1), (4, 1), (6, 1)])
    assert on_cards(cards.faults(0)) == [(4, "80E01801")], "the list was not complete before"


class NpuSmi:
    """A tool that says what it is told to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "npu-smi"
        cases = "".join(f'"info -t health -i {card}") exec cat card{card};; ' for card in range(3))
        self.path.write_text(f'#!/bin/sh\ncd {folder}\ncase "$*" in "info -l") exec cat list;; {cases}esac\nexit 1\n')
        self.path.chmod(0o755)
        self.list(0, 1, 2)
        for card in range(3):
            self.card(card, "OK")

    def list(self, *cards: int) -> None:
        self._write("list", "".join(f"NPU ID : {card}\nChip Count : 1\n\n" for card in cards))

    def card(self, card: int, state: str, code: str = "NA") -> None:
        self._write(f"card{card}", f"Health : {state}\nError Code : {code}\n")

    def silent(self, name: str) -> None:
        (self.folder / name).unlink()

    def _write(self, name: str, text: str) -> None:
        (self.folder / "new").write_text(text)
        (self.folder / "new").rename(self.folder / name)


def places(faults: list[AnyFault]) -> list[tuple[object, str]]:
    found: list[tuple[object, str]] = []
    for fault in faults:
        found.append((fault.chip if isinstance(fault, ChipFault) else fault.key[1], fault.code))
    return sorted(found, key=lambda place: place[1])


async def test_a_tool_that_no_longer_answers_takes_no_fault_back(tmp_path: Path) -> None:
    tool = NpuSmi(tmp_path)
    tool.card(1, "Alarm", "80E01801")
    detector = ascend.Ascend(tool=str(tool.path), every=0.01)
    chip, silent = (1, "80E01801"), ("NPU", codes.NPU_TOOL)
    assert places(await seen(detector, lambda told: True)) == [chip]
    tool.silent("list")
    assert places(await seen(detector, lambda told: places(told) != [chip])) == [chip, silent]
    tool.list(0, 1, 2)
    await seen(detector, lambda told: places(told) == [chip])
    tool.silent("card1")
    faults = await seen(detector, lambda told: places(told) != [chip])
    assert places(faults) == [chip, silent]
    assert "card 1" in next(fault.note for fault in faults if fault.code == codes.NPU_TOOL)
    tool.card(1, "OK")
    assert await seen(detector, lambda told: not told) == []


async def test_a_card_that_is_not_listed_any_more_is_lost(tmp_path: Path) -> None:
    tool = NpuSmi(tmp_path)
    tool.card(2, "Alarm", "80E01801")
    detector = ascend.Ascend(tool=str(tool.path), every=0.01)
    assert places(await seen(detector, lambda told: True)) == [(2, "80E01801")]
    tool.list(0, 2)
    faults = await seen(detector, lambda told: places(told) != [(2, "80E01801")])
    assert places(faults) == [(1, "40F84E00"), (2, "80E01801")]


async def test_what_a_noded_before_us_has_found_stays_while_the_tool_does_not_answer(tmp_path: Path) -> None:
    tool = NpuSmi(tmp_path)
    tool.silent("list")
    detector = ascend.Ascend(tool=str(tool.path), every=0.01)
    detector.resume([ChipFault(code="80E01801", chip=chip, since_ms=1) for chip in (0, 1)])
    faults = await seen(detector, lambda told: len(told) != 2)
    assert places(faults) == [(0, "80E01801"), (1, "80E01801"), ("NPU", codes.NPU_TOOL)]
    tool.silent("card0")
    tool.list(0, 1, 2)
    faults = await seen(detector, lambda told: (1, "80E01801") not in places(told))
    assert places(faults) == [(0, "80E01801"), ("NPU", codes.NPU_TOOL)], "card 1 was heard, card 0 was not"


async def test_a_tool_that_can_not_even_be_killed_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is inside of a driver that hangs."""
    path, begun = tmp_path / "tool", tmp_path / "begun"
    path.write_text(f"#!/bin/sh\necho $$ >> {begun}\nexec sleep 1000\n")
    path.chmod(0o755)
    monkeypatch.setattr(tool, "PATIENCE", 0.5)
    monkeypatch.setattr(tool, "END_PATIENCE", 0.01)
    with monkeypatch.context() as deaf:
        deaf.setattr(asyncio.subprocess.Process, "kill", lambda process: None)
        asked = tool.Tool(str(path))
        while not begun.exists():
            assert await asked.ask() is None
        assert await asked.ask() is None
    os.kill(int(begun.read_text()), signal.SIGKILL)
    async with aio.timeout(60):
        while asked._left is not None and asked._left.returncode is None:
            await asyncio.sleep(0.01)
    path.write_text("#!/bin/sh\necho well\n")
    monkeypatch.setattr(tool, "PATIENCE", 60)
    assert await asked.ask() == "well\n"


async def test_a_tool_that_fails_again_and_again_is_a_fault(tmp_path: Path) -> None:
    tool = tmp_path / "npu-smi"
    tool.write_text("#!/bin/sh\nexit 3\n")
    tool.chmod(0o755)
    faults = await seen(ascend.Ascend(tool=str(tool), every=0.01), lambda told: told)
    assert found(faults) == [(codes.NPU_TOOL, 0)]
