"""Each fault of a job that begins or ends is a line of the log."""

from __future__ import annotations

from evertrain.clusterd.faults.faultlog import MOST, FaultLog
from evertrain.clusterd.model import FaultDevice, JobFaults


def faults(*devices: FaultDevice) -> JobFaults:
    return JobFaults("U", devices=devices)


def chip(number: int, code: str, level: str = "SeparateNPU") -> FaultDevice:
    return FaultDevice("node-1", "10.0.0.1", "", str(number), "NPU", code, level)


def test_what_begins_and_ends_is_said_once() -> None:
    log = FaultLog()
    node = FaultDevice("node-1", "10.0.0.1", "", "-1", "Node")
    assert log.update(faults(chip(1, "80C98009"), node)) == [
        "job U: fault 80C98009 (SeparateNPU) of NPU 1 of node-1 has begun",
        "job U: fault without code (no level) of node-1 has begun",
    ]
    assert log.update(faults(chip(1, "80C98009"), node)) == []
    assert log.update(faults(chip(2, "80E01801", "RestartBusiness"), node)) == [
        "job U: fault 80E01801 (RestartBusiness) of NPU 2 of node-1 has begun",
        "job U: fault 80C98009 (SeparateNPU) of NPU 1 of node-1 has ended",
    ]
    assert len(log.update(faults())) == 2
    assert log.update(faults()) == []


def test_a_flood_is_summed_up() -> None:
    lines = FaultLog().update(faults(*(chip(number, "80C98009") for number in range(MOST + 5))))
    assert len(lines) == MOST + 1 and lines[-1] == "job U: 5 more faults have begun or ended"
