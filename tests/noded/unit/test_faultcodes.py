"""Levels of fault codes, what administrators say about them, and faults that come often or stay long."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.faultcodes import overrides
from evertrain.faultcodes.levels import health, severity, switch_level, worst, worst_node, worst_switch
from evertrain.faultcodes.rules import Upgrade, Upgrades, worst_with
from evertrain.faultcodes.table import Codes, Duration, Frequency, read, shipped

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = Path(os.environ.get("EVERTRAIN_SAMPLES") or ROOT.parent / "shared" / "reference" / "samples")
FACTS = [file for file in [SAMPLES / "fault_code_levels.csv"] if file.is_file()]
S, HOUR = 1000, 3_600_000


@pytest.mark.parametrize("file", FACTS)
def test_every_documented_code_has_its_level(file: Path) -> None:
    codes = shipped()
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert len(rows) > 800
    for row in rows:
        code, level = row["code"], row["default_level"]
        if row["source"] == "switch":
            assert codes.switch_level(code) == switch_level(level)
        elif row["source"] == "node":
            assert codes.node_level(code) == level
        elif code == "A2301001":
            assert codes.chip_level(code) == "SeparateNPU", "it is in two lists; the worse counts"
        else:
            assert codes.chip_level(code) == level


@pytest.mark.parametrize(
    ("code", "level"),
    [
        ("80E21007", "NotHandleFault"),
        ("80E18405", "SubHealthFault"),
        ("80C98009", "RestartRequest"),
        ("80E01801", "RestartBusiness"),
        ("8C084E00", "FreeRestartNPU"),
        ("40F84E00", "RestartNPU"),
        ("110001024", "PreSeparateNPU"),
        ("80E18402", "SeparateNPU"),
        ("0x80e18402", "SeparateNPU"),
    ],
)
def test_levels_of_chips(code: str, level: str) -> None:
    assert shipped().chip_level(code) == level


def test_unknown_codes() -> None:
    codes = shipped()
    assert codes.chip_level("DEADBEEF") == "SeparateNPU"
    assert codes.chip_level("DEADBEEF", driver=2) == "SeparateNPU"
    assert codes.chip_level("DEADBEEF", driver=1) == "NotHandleFault"
    assert codes.chip_levels([]) == "NormalNPU"
    assert codes.chip_levels(["80E21007", "80E01801"]) == "RestartBusiness"
    assert codes.switch_level("[0x00000000,na,na,na]") is None
    assert codes.node_level("FFFFFFFF") is None
    assert codes.public_level("999999999") is None
    network = Codes(network=frozenset({"81078603", "110001024"}), chip={"110001024": "RestartNPU"})
    assert network.chip_level("81078603") == "PreSeparateNPU"
    assert network.chip_level("110001024") == "NotHandleFault", "not a level for links"


def test_order_and_health() -> None:
    by_severity = (
        "ManuallySeparateNPU SeparateNPU PreSeparateNPU RestartNPU FreeRestartNPU RestartBusiness RestartRequest "
        "SubHealthFault NotHandleFault NormalNPU"
    )
    order = by_severity.split()
    assert sorted(order, key=severity, reverse=True) == order
    assert worst(reversed(order)) == "ManuallySeparateNPU" and worst([]) == "NormalNPU"
    assert worst(["RestartNPU", "never heard of"]) == "never heard of"
    assert worst_node(["NotHandleFault", "SeparateFault", "PreSeparateFault"]) == "SeparateFault"
    assert worst_switch(["NotHandle", "ResetFault", "PreSeparate"]) == "Separate"
    assert worst_switch([]) == ""
    assert {level: health(level) for level in ("NotHandleFault", "NotHandle", "SubHealthFault", "PreSeparateNPU")} == {
        "NotHandleFault": "Healthy",
        "NotHandle": "Healthy",
        "SubHealthFault": "SubHealthy",
        "PreSeparateNPU": "SubHealthy",
    }
    assert all(health(level) == "UnHealthy" for level in ("RestartRequest", "SeparateFault", "Separate", "what?"))


@pytest.mark.parametrize("text", ["", "[chip]", "a = [", '[chip]\nBad = ["1"]\n[switch]\n[node]\n[public]'])
def test_a_broken_table_says_so(text: str) -> None:
    with pytest.raises(ValueError):
        read(text)


def test_chips_as_the_administrator_says() -> None:
    text = json.dumps({"RestartNPUCodes": ["80e01801"], "SeparateNPUCodes": None, "PreSeparateNPUNetworkCodes": ["X1"]})
    codes, wrong = overrides.with_config(shipped(), {"faultCode.json": text})
    assert not wrong
    assert codes.chip_level("80E01801") == "RestartNPU"
    assert codes.chip_level("80E18402", driver=1) == "NotHandleFault", "the file is the whole table"
    assert codes.is_network("X1") and codes.is_network("81078603")
    assert codes.switch == shipped().switch


@pytest.mark.parametrize("text", ["", "x", "[]", '{"RestartNPUCodes": "80E01801"}', '{"RestartNPUCodes": [1]}'])
def test_what_cannot_be_used_changes_nothing(text: str) -> None:
    for override in (overrides.chips, overrides.switches, overrides.nodes, overrides.public):
        codes, wrong = override(shipped(), text)
        assert codes == shipped() and len(wrong) == 1


def test_switches_as_the_administrator_says() -> None:
    text = json.dumps({
        "ResetFaultCodes": ["[0x00f1fef5, 155912, cpu, na]"],
        "SubHealthFaultCodes": ["[0x00f1fef5,155912,gpu,na]", "x" * 60],
    })  # fmt: skip
    codes, wrong = overrides.switches(shipped(), text)
    assert codes.switch == {"[0x00f1fef5,155912,cpu,na]": "Separate"}
    assert len(wrong) == 2


def test_nodes_as_the_administrator_says() -> None:
    good = {"FaultTypeCode": {"NotHandleFaultCodes": ["0000000a"], "SeparateFaultCodes": ["0000000B"]}}
    codes, wrong = overrides.nodes(shipped(), json.dumps(good))
    assert not wrong and codes.node == {"0000000A": "NotHandleFault", "0000000B": "SeparateFault"}
    for bad in (
        {"NotHandleFaultCodes": ["0000000A"], "SeparateFaultCodes": ["0000000a"]},
        {"SeparateFaultCodes": ["1"]},
    ):
        codes, wrong = overrides.nodes(shipped(), json.dumps({"FaultTypeCode": bad}))
        assert codes == shipped() and wrong


def test_public_faults_as_the_administrator_says() -> None:
    text = json.dumps({
        "publicFaultCode": {"NotHandleFaultCodes": ["010001008"], "SeparateNPUCodes": ["010001008", "1"]},
        "publicFaultResource": ["mine"],
    })  # fmt: skip
    codes, wrong = overrides.public(shipped(), text)
    assert codes.public == {"010001008": "SeparateNPU"} and codes.resources == {"mine"}
    assert len(wrong) == 1


def test_rules_as_the_administrator_says() -> None:
    text = json.dumps({
        "FaultFrequency": [
            {"EventId": ["80E18005"], "TimeWindow": 60, "Times": 1, "FaultHandling": "SeparateNPU",
             "ReleaseTimeWindow": 60},
            {"EventId": ["80E18005"], "TimeWindow": 60, "Times": 1, "FaultHandling": "SeparateNPU"},
            {"EventId": ["80E18005"], "TimeWindow": 59, "Times": 1, "FaultHandling": "ManuallySeparateNPU"},
            {"EventId": ["80E18005"], "TimeWindow": 60, "Times": 101, "FaultHandling": "ManuallySeparateNPU"},
            {"EventId": [], "TimeWindow": 60, "Times": 1, "FaultHandling": "ManuallySeparateNPU"},
        ],
        "FaultDuration": [
            {"EventId": ["81078603"], "FaultTimeout": 600, "RecoverTimeout": 0, "FaultHandling": "PreSeparateNPU"},
            {"EventId": ["81078603"], "FaultTimeout": 601, "RecoverTimeout": 0, "FaultHandling": "PreSeparateNPU"},
            {"EventId": ["81078603"], "FaultTimeout": 6, "RecoverTimeout": 0, "FaultHandling": "ManuallySeparateNPU"},
        ],
    })  # fmt: skip
    codes, wrong = overrides.rules(shipped(), text)
    assert codes.frequency == (Frequency(frozenset({"80E18005"}), 60, 1, "SeparateNPU", 60),)
    assert codes.duration == (Duration(frozenset({"81078603"}), 600, 0, "PreSeparateNPU"),)
    assert len(wrong) == 6
    assert overrides.rules(shipped(), "[]")[0] == shipped()


def test_the_shipped_rules() -> None:
    often = {code: rule for rule in shipped().frequency for code in rule.codes}
    assert len(often) == 43
    assert (often["80E01801"].times, often["80E18005"].times, often["81078603"].times) == (2, 3, 5)
    assert often["81078603"].release_s == 172_800 and often["80E01801"].release_s is None


def levels(upgrades: tuple[Upgrade, ...]) -> list[str]:
    return [upgrade.level for upgrade in upgrades]


def test_a_fault_that_comes_twice_in_a_day_isolates_its_chip_for_good() -> None:
    rules = Upgrades(shipped())
    assert rules.observe("Ascend910-0", {"80E01801": 1 * S}, 1 * S) == ()
    assert rules.observe("Ascend910-0", {"80E01801": 1 * S}, 2 * S) == (), "still the same"
    assert rules.observe("Ascend910-0", {}, 3 * S) == ()
    assert rules.observe("Ascend910-1", {"80E01801": 4 * S}, 4 * S) == (), "another chip"
    again = rules.observe("Ascend910-0", {"80E01801": 23 * HOUR}, 23 * HOUR)
    assert again == (Upgrade(23 * HOUR, "80E01801", "ManuallySeparateNPU", "FaultFrequency"),)
    assert worst_with("RestartBusiness", again) == "ManuallySeparateNPU"
    assert rules.manual() == ("Ascend910-0",)
    restarted = Upgrades(shipped())
    restarted.load(rules.dump())
    assert levels(restarted.observe("Ascend910-0", {}, 999 * HOUR)) == ["ManuallySeparateNPU"]
    restarted.clear("Ascend910-0")
    assert restarted.observe("Ascend910-0", {}, 999 * HOUR) == () and restarted.manual() == ()


def test_twice_in_two_days_is_not_often() -> None:
    rules = Upgrades(shipped())
    rules.observe("a", {"80E01801": 0}, 0)
    rules.observe("a", {}, 1)
    assert rules.observe("a", {"80E01801": 24 * HOUR}, 24 * HOUR) == ()


def test_a_fault_that_came_again_unseen_counts() -> None:
    rules = Upgrades(shipped())
    rules.observe("a", {"80E01801": 1 * S}, 1 * S)
    assert levels(rules.observe("a", {"80E01801": 5 * S}, 6 * S)) == ["ManuallySeparateNPU"]


def test_a_link_that_stays_down_and_comes_back() -> None:
    rules = Upgrades(shipped())
    assert rules.observe("a", {"81078603": 0}, 0) == ()
    assert rules.next_ms(0) == 20 * S
    assert rules.observe("a", {"81078603": 0}, 20 * S - 1) == ()
    assert levels(rules.observe("a", {"81078603": 0}, 20 * S)) == ["PreSeparateNPU"]
    assert levels(rules.observe("a", {}, 30 * S)) == ["PreSeparateNPU"]
    assert rules.next_ms(30 * S) == 90 * S
    assert levels(rules.observe("a", {}, 90 * S - 1)) == ["PreSeparateNPU"]
    assert rules.observe("a", {}, 90 * S) == ()


def test_a_link_that_flaps_shortly_does_not_count_and_one_that_stays_down_five_times_does() -> None:
    rules = Upgrades(shipped())
    now = 0
    for _ in range(10):
        rules.observe("a", {"81078603": now}, now)
        now += 10 * S
        assert rules.observe("a", {}, now) == ()
        now += 10 * S
    for round in range(5):
        start = now
        rules.observe("a", {"81078603": start}, now)
        now += 20 * S
        found = levels(rules.observe("a", {"81078603": start}, now))
        assert found == ["PreSeparateNPU"] + ["ManuallySeparateNPU"] * (round == 4)
        now += S
        rules.observe("a", {}, now)
        now += 100 * S
        rules.observe("a", {}, now)
    gone = now - 100 * S
    assert rules.next_ms(now) == gone + 48 * HOUR, "48 h after the last has gone"
    assert levels(rules.observe("a", {}, gone + 48 * HOUR - 1)) == ["ManuallySeparateNPU"]
    assert rules.observe("a", {}, gone + 48 * HOUR) == ()


def test_a_clock_set_back_does_not_count() -> None:
    rules = Upgrades(shipped())
    rules.observe("a", {"80E01801": 100 * HOUR}, 100 * HOUR)
    rules.observe("a", {}, 100 * HOUR)
    assert rules.observe("a", {"80E01801": 0}, 0) == ()


@pytest.mark.parametrize("data", [b"", b"x", b"[]", b'{"version":2}', b'{"chips":{"a":1}}'])
def test_a_dump_that_is_none(data: bytes) -> None:
    with pytest.raises(ValueError):
        Upgrades(shipped()).load(data)


TIMES = st.integers(-(2**53), 2**53)
PRESENT = st.dictionaries(st.sampled_from(["80E01801", "81078603", "x"]), TIMES)


@given(st.lists(st.tuples(PRESENT, TIMES)))
def test_any_sequence_of_observations_is_survived_and_kept(steps: list[tuple[dict[str, int], int]]) -> None:
    rules = Upgrades(shipped())
    for present, now in steps:
        found = rules.observe("a", present, now)
        assert all(each.level in ("PreSeparateNPU", "ManuallySeparateNPU") for each in found)
        when = rules.next_ms(now)
        assert when is None or when > now
        copy = Upgrades(shipped())
        copy.load(rules.dump())
        assert copy.dump() == rules.dump()


@given(st.text() | st.builds(json.dumps, st.dictionaries(
    st.sampled_from(["FaultFrequency", "FaultDuration", "FaultTypeCode", "publicFaultCode", "SeparateNPUCodes"]),
    st.none() | st.text() | st.lists(st.text() | st.none()) | st.dictionaries(st.text(), st.lists(st.text())),
)))  # fmt: skip
def test_garbage_from_administrators(text: str) -> None:
    for override in (overrides.chips, overrides.switches, overrides.nodes, overrides.public, overrides.rules):
        codes, wrong = override(shipped(), text)
        assert codes == shipped() or codes.chip is not None
