"""What is published about a node: chips by the level of their faults, the switch, the node; and how it is compared."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from evertrain.faultcodes import overrides
from evertrain.faultcodes.rules import BY_DURATION, BY_FREQUENCY, Upgrade
from evertrain.noded import codes as own
from evertrain.noded import picture
from evertrain.noded.announce import differences, message
from evertrain.noded.contents import DeviceContent, NodeContent, upgrade_reasons
from evertrain.noded.faults import ChipFault, NodeFault, SwitchFault
from evertrain.noded.picture import Chips, Judged
from evertrain.noded.tables import tables
from evertrain.wire import faultinfo

CODES, _ = tables(None, None)
CHIPS = Chips("Ascend910", tuple(range(4)))
NOW = 1_744_167_455_784


def chip(number: int, code: str, level: str = "", since: int = NOW) -> ChipFault:
    return ChipFault(code=code, chip=number, level=level, since_ms=since)


def published(*faults: Any, used: Any = (), upgrades: Any = None, manual: Any = ()) -> faultinfo.DeviceInfo:
    return picture.device_info(CHIPS, used, picture.judge(faults, CODES), upgrades or {}, manual, CODES)


def numbers(names: tuple[str, ...]) -> list[int]:
    return [int(name.removeprefix("Ascend910-")) for name in names]


@pytest.mark.parametrize(
    ("level", "out", "out_in_use"),
    [
        ("NotHandleFault", False, False),
        ("SubHealthFault", False, False),
        ("RestartRequest", True, True),
        ("RestartBusiness", True, True),
        ("FreeRestartNPU", True, True),
        ("RestartNPU", True, True),
        ("PreSeparateNPU", True, False),
        ("SeparateNPU", True, True),
        ("ManuallySeparateNPU", True, True),
    ],
)
def test_a_chip_is_taken_out_as_its_level_demands(level: str, out: bool, out_in_use: bool) -> None:
    info = published(chip(1, "80E01801", level))
    assert numbers(info.unhealthy) == ([1] if out else [])
    assert numbers(info.available) == ([0, 2, 3] if out else [0, 1, 2, 3])
    assert info.faults == (faultinfo.ChipFault("Ascend910-1", "80E01801", level, NOW, "CardUnhealthy"),)
    used = published(chip(1, "80E01801", level), used={1})
    assert numbers(used.unhealthy) == ([1] if out_in_use else [])
    assert numbers(used.available) == [0, 2, 3], "one that is used isn't free"


@pytest.mark.parametrize(
    ("level", "bad"),
    [("NotHandleFault", False), ("SubHealthFault", True), ("PreSeparateNPU", True), ("SeparateNPU", True)],
)
def test_a_bad_network_only_puts_a_chip_on_the_list_of_those(level: str, bad: bool) -> None:
    info = published(chip(1, "81078603", level))
    assert numbers(info.network_unhealthy) == ([1] if bad else [])
    assert not info.unhealthy and numbers(info.available) == [0, 1, 2, 3]
    assert [fault.kind for fault in info.faults] == ["CardNetworkUnhealthy"]


def test_levels_come_from_the_codes() -> None:
    info = published(chip(0, "80E01801"), chip(1, "A8028801"), chip(1, "80E18401"), chip(2, "99999999"))
    assert [(fault.chip[-1], fault.code, fault.level) for fault in info.faults] == [
        ("0", "80E01801", "RestartBusiness"),
        ("1", "A8028801", "SeparateNPU"),
        ("1", "80E18401", CODES.chip_level("80E18401")),
        ("2", "99999999", "SeparateNPU"),
    ]


def test_chips_that_the_node_does_not_have_are_left_out() -> None:
    assert published(chip(9, "80E01801")).faults == ()


def test_a_fault_that_stayed_is_worse_also_for_a_while_after_it_has_gone() -> None:
    upgrades = {1: (Upgrade(NOW + 20_000, "81078603", "PreSeparateNPU", BY_DURATION),)}
    there = published(chip(1, "81078603"), upgrades=upgrades)
    assert [(fault.level, fault.time_ms) for fault in there.faults] == [("PreSeparateNPU", NOW)]
    assert numbers(there.network_unhealthy) == [1]
    gone = published(upgrades=upgrades)
    assert [(fault.code, fault.time_ms) for fault in gone.faults] == [("81078603", NOW + 20_000)]
    assert numbers(gone.network_unhealthy) == [1]


def test_a_chip_that_is_kept_away_says_so() -> None:
    upgrades = {1: (Upgrade(NOW, "80E01801", "ManuallySeparateNPU", BY_FREQUENCY),)}
    gone = published(upgrades=upgrades, manual=[1])
    assert gone.faults == (faultinfo.ChipFault("Ascend910-1", "ManuallySeparateNPU", "ManuallySeparateNPU", 0),)
    there = published(chip(1, "80E01801"), chip(1, "81AD8605"), upgrades=upgrades, manual=[1])
    assert [(fault.code, fault.level) for fault in there.faults][0] == ("80E01801", "ManuallySeparateNPU")
    for info in (gone, there):
        assert numbers(info.unhealthy) == [1] and numbers(info.available) == [0, 2, 3]
        text = faultinfo.encode_device(info)
        assert faultinfo.decode_device(text).faults == info.faults, "and those who read it see it"


def test_the_documented_example_comes_out() -> None:
    """The A3 example of the original's documents, field for field, but for the order of codes of one level."""
    chips = Chips("Ascend910", tuple(range(8)))
    faults = [
        chip(0, "81078603", "PreSeparateNPU", 1744168468259),
        chip(4, "A8028801", "SeparateNPU", 1744167455784),
        chip(4, "80E18402", "SeparateNPU", 1744167455784),
        chip(4, "A4028801", "NotHandleFault", 1744167455784),
        chip(4, "80E18401", "NotHandleFault", 1744167455784),
    ]
    info = picture.device_info(chips, (), picture.judge(faults, CODES), {}, (), CODES)
    text = faultinfo.encode_device(replace(info, update_time=1744182144))
    inner = json.loads(text)["DeviceInfo"]
    lists = inner["DeviceList"]
    assert inner["UpdateTime"] == 1744182144
    assert lists["huawei.com/Ascend910"] == ",".join(f"Ascend910-{n}" for n in (0, 1, 2, 3, 5, 6, 7))
    assert lists["huawei.com/Ascend910-NetworkUnhealthy"] == "Ascend910-0"
    assert lists["huawei.com/Ascend910-Unhealthy"] == "Ascend910-4"
    network, card = json.loads(lists["huawei.com/Ascend910-Fault"])
    assert network == {
        "fault_type": "CardNetworkUnhealthy",
        "npu_name": "Ascend910-0",
        "large_model_fault_level": "PreSeparateNPU",
        "fault_level": "PreSeparateNPU",
        "fault_handling": "PreSeparateNPU",
        "fault_code": "81078603",
        "fault_time_and_level_map": {"81078603": {"fault_time": 1744168468259, "fault_level": "PreSeparateNPU"}},
    }
    assert card["fault_code"] == "80E18402,A8028801,80E18401,A4028801" and card["fault_level"] == "SeparateNPU"


@pytest.mark.parametrize(
    ("annotations", "capacity", "expected"),
    [
        ({}, {"cpu": "4"}, Chips()),
        ({}, {"huawei.com/Ascend910": "2"}, Chips("Ascend910", (0, 1))),
        (
            {"baseDeviceInfos": '{"Ascend910-4":{"IP":"x"},"Ascend910-6": {}}'},
            {"huawei.com/Ascend910": "2"},
            Chips("Ascend910", (4, 6)),
        ),
        ({}, {"huawei.com/npu": 3}, Chips("npu", (0, 1, 2))),
        ({"superPodID": "3", "serverIndex": "1"}, {"huawei.com/Ascend910": "1"}, Chips("Ascend910", (0,), 3, 1)),
        ({"superPodID": "-1", "serverIndex": "x"}, {"huawei.com/Ascend910": "1"}, Chips("Ascend910", (0,), -2, -2)),
        ({"baseDeviceInfos": "junk"}, {"huawei.com/Ascend910": "junk"}, Chips()),
    ],
)
def test_which_chips_a_node_has(annotations: Any, capacity: Any, expected: Chips) -> None:
    assert picture.chips_of(annotations, capacity) == expected


def test_which_chips_are_used() -> None:
    pods = [{"huawei.com/Ascend910": "Ascend910-0,Ascend910-13"}, {}, {"huawei.com/AscendReal": "Ascend910-2"}]
    assert picture.used_chips("Ascend910", pods) == {0, 2, 13}


def test_parts_of_a_node_have_the_worst_level_of_their_codes() -> None:
    faults = [
        NodeFault(code="0100000D", device="Memory", id=1, since_ms=NOW),
        NodeFault(code="01000017", device="Memory", id=1, since_ms=NOW),
        NodeFault(code=own.CLOCK_JUMP, device="Node", since_ms=NOW),
        NodeFault(code="12345678", device="CPU", since_ms=NOW),
    ]
    info = picture.node_info(picture.judge(faults, CODES))
    assert info.status == "PreSeparate"
    assert info.faults == (
        faultinfo.NodeFault("Memory", 1, ("0100000D", "01000017"), "PreSeparateFault"),
        faultinfo.NodeFault("Node", 0, (own.CLOCK_JUMP,), "NotHandleFault"),
    ), "a code that nobody has listed is not reported"


@pytest.mark.parametrize(
    ("code", "status"), [("0100000D", "Healthy"), ("0000001D", "PreSeparate"), ("2C000031", "UnHealthy")]
)
def test_the_status_of_a_node(code: str, status: str) -> None:
    judged = picture.judge([NodeFault(code=code, device="CPU", since_ms=NOW)], CODES)
    assert picture.node_info(judged).status == status
    assert picture.node_info([]) == faultinfo.NodeInfo()


@pytest.mark.parametrize(
    ("code", "level", "status"),
    [
        ("[0x00f1fef5,155914,npu,na]", "RestartRequest", "UnHealthy"),
        ("[0x08520003,na,npu,na]", "Separate", "UnHealthy"),
        ("[0x00f10509,132333,cpu,na]", "SubHealthFault", "SubHealthy"),
        ("[0x00f103b6,155909,na,na]", "NotHandle", "Healthy"),
        ("[0x00000001,na,na,na]", "", "Healthy"),
    ],
)
def test_the_status_of_a_switch(code: str, level: str, status: str) -> None:
    info = picture.switch_info(picture.judge([SwitchFault(code=code, since_ms=NOW)], CODES))
    assert (info.level, info.status, len(info.faults)) == (level, status, int(bool(level)))


def test_a_switch_that_has_lost_all_its_ports_is_cut_off() -> None:
    down = [SwitchFault(code=picture.L2_DOWN, chip=2, port=port, since_ms=NOW) for port in range(16)]
    assert picture.switch_info(picture.judge(down, CODES)).level == "Separate"
    assert picture.switch_info(picture.judge(down[:15], CODES)).level == "NotHandle"


# --- tables


def test_our_codes_are_no_codes_of_the_original() -> None:
    from evertrain.faultcodes.table import shipped

    assert not set(own.LEVELS) & set(shipped().node)
    assert all(len(code) == 8 and code.startswith("E") for code in own.LEVELS)
    assert own.xid_code(79) == "E600004F"


def test_a_configuration_made_for_the_original_leaves_our_detectors_on() -> None:
    config = {overrides.NODE_FILE: json.dumps({"FaultTypeCode": {"SeparateFaultCodes": ["0000001D", own.DISK_FULL]}})}
    found, wrong = tables(None, config)
    assert not wrong
    assert found.node_level("0000001D") == "SeparateFault" and found.node_level("2C000031") is None
    assert found.node_level(own.DISK_FULL) == "SeparateFault", "what it does say about them counts"
    assert found.node_level(own.READ_ONLY) == own.LEVELS[own.READ_ONLY]


def test_a_configuration_that_can_not_be_used_changes_nothing() -> None:
    found, wrong = tables({overrides.CHIP_FILE: "{"}, {overrides.NODE_FILE: "[]"})
    assert len(wrong) == 2 and found.chip == CODES.chip and found.node == CODES.node


def test_the_local_file_counts_where_there_is_no_config_map() -> None:
    text = json.dumps({"FaultTypeCode": {"SeparateFaultCodes": ["0000001D"]}})
    assert tables(None, None, text)[0].node_level("0000001D") == "SeparateFault"
    other = {overrides.NODE_FILE: json.dumps({"FaultTypeCode": {"NotHandleFaultCodes": ["0000001D"]}})}
    assert tables(None, other, text)[0].node_level("0000001D") == "NotHandleFault"


# --- contents


def device_content(**changes: Any) -> DeviceContent:
    return replace(DeviceContent(published(chip(1, "80E01801"))), **changes)


def written(content: Any, now: float = 1000.0) -> dict[str, str]:
    return {key: text for key, text in content.render({}, now).items() if text is not None}


def test_what_was_written_is_known_again_with_its_age() -> None:
    switch = picture.switch_info(picture.judge([SwitchFault(code=picture.L2_DOWN, since_ms=NOW)], CODES))
    for content in (
        device_content(),
        device_content(switch=switch, manual=("Ascend910-1",), upgrades="{}", state="x"),
        DeviceContent(published(upgrades={}, manual=[2]), manual=("Ascend910-2",)),
        NodeContent(picture.node_info([Judged(NodeFault(code="0000001D", device="CPU", since_ms=1), "SeparateFault")])),
    ):
        assert content.age(written(content), 1030.4) == pytest.approx(30.4)
        assert content.age({}, 1000.0) is None


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("DeviceInfoCfg", "junk"),
        ("DeviceInfoCfg", ""),
        ("DeviceInfoCfg", faultinfo.encode_device(published())),
        ("ManuallySeparateNPU", "Ascend910-2"),
        ("UpgradeFaultReason", "x"),
        ("SwitchInfoCfg", faultinfo.encode_switch(faultinfo.SwitchInfo())),
        ("SwitchInfoCfg", "junk"),
    ],
)
def test_what_somebody_has_changed_is_something_else(key: str, text: str) -> None:
    content = device_content()
    assert content.age({**written(content), key: text}, 1001.0) is None


def test_the_list_that_people_edit_is_only_written_when_it_changes() -> None:
    content = device_content(manual=("Ascend910-1",))
    assert "ManuallySeparateNPU" not in content.render({"ManuallySeparateNPU": "Ascend910-1"}, 0.0)
    assert content.render({"ManuallySeparateNPU": ""}, 0.0)["ManuallySeparateNPU"] == "Ascend910-1"


def test_upgrade_reasons_are_go_s_text() -> None:
    reasons = upgrade_reasons(
        {"Ascend910-1": (Upgrade(5, "80E01801", "ManuallySeparateNPU", BY_FREQUENCY),), "Ascend910-0": ()}
    )
    assert reasons == (
        '{"Ascend910-1":[{"upgrade_time":5,"fault_code":"80E01801","fault_level":"ManuallySeparateNPU",'
        '"upgrade_type":"FaultFrequency"}]}'
    )
    assert upgrade_reasons({"Ascend910-0": ()}) == ""


def test_events_tell_what_came_and_what_went() -> None:
    one, event = chip(1, "80E01801"), replace(chip(2, "80E01801"), until_ms=NOW + 1, note="a note")
    before = {one.key: (one, "RestartBusiness")}
    after = {event.key: (event, "RestartBusiness")}
    assert differences({}, before) == [("Occur", one, "RestartBusiness")]
    assert differences(before, before) == []
    assert differences(before, {one.key: (one, "SeparateNPU")}) == [("Occur", one, "SeparateNPU")]
    assert differences(before, after) == [("Notice", event, "RestartBusiness"), ("Recovery", one, "RestartBusiness")]
    assert differences(after, {}) == [], "an event is no state that could be over"
    assert message(event, "RestartBusiness") == "chip 2: fault 80E01801, level RestartBusiness (a note)"
