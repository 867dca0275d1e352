"""What nodes publish about faults: byte for byte, and only if its CheckCode is right."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.wire import faultinfo
from evertrain.wire.faultinfo import (
    BadInfo,
    ChipFault,
    DeviceInfo,
    NodeFault,
    NodeInfo,
    SwitchFault,
    SwitchInfo,
    decode_device,
    decode_node,
    decode_switch,
    encode_device,
    encode_node,
    encode_switch,
    go_json,
)

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = Path(os.environ.get("EVERTRAIN_SAMPLES") or ROOT.parent / "shared" / "reference" / "samples")
DOCUMENTED = [file for file in [SAMPLES / "deviceinfo_DeviceInfoCfg_a3.json"] if file.is_file()]

DEVICE = DeviceInfo(
    available=("Ascend910-0", "Ascend910-2"),
    unhealthy=("Ascend910-1",),
    network_unhealthy=("Ascend910-2",),
    recovering=("Ascend910-3",),
    faults=(
        ChipFault("Ascend910-1", "80E18005", "RestartNPU", 1_700_000_000_123),
        ChipFault("Ascend910-1", "80E01801", "RestartBusiness", 1_700_000_000_456),
        ChipFault("Ascend910-2", "81078603", "PreSeparateNPU", 1_700_000_000_789, faultinfo.CARD_NETWORK),
    ),
    update_time=1_700_000_001,
    super_pod=3,
    server_index=7,
)


@pytest.mark.parametrize("file", DOCUMENTED)
def test_the_documented_example_is_read_and_written_byte_for_byte(file: Path) -> None:
    text = file.read_text().strip()
    info = decode_device(text)
    assert info.unhealthy == ("Ascend910-4",) and info.network_unhealthy == ("Ascend910-0",)
    assert [fault.code for fault in info.faults] == ["81078603", "A8028801", "A4028801", "80E18402", "80E18401"]
    assert info.faults[-1] == ChipFault("Ascend910-4", "80E18401", "NotHandleFault", 1744167455784)
    assert encode_device(info) == text


def test_devices_are_written_as_go_writes_them() -> None:
    text = encode_device(DEVICE)
    inner = text.removeprefix('{"DeviceInfo":').split(',"SuperPodID":3,"ServerIndex":7,"CheckCode":"')[0]
    assert text.endswith(f'"CheckCode":"{hashlib.sha256(inner.encode()).hexdigest()}"}}')
    lists = json.loads(inner)["DeviceList"]
    assert list(lists) == [
        "huawei.com/Ascend910",
        "huawei.com/Ascend910-Fault",
        "huawei.com/Ascend910-NetworkUnhealthy",
        "huawei.com/Ascend910-Recovering",
        "huawei.com/Ascend910-Unhealthy",
    ]
    assert lists["huawei.com/Ascend910-Fault"].startswith(
        '[{"fault_type":"CardUnhealthy","npu_name":"Ascend910-1","large_model_fault_level":"RestartNPU",'
        '"fault_level":"RestartNPU","fault_handling":"RestartNPU","fault_code":"80E18005,80E01801",'
        '"fault_time_and_level_map":{"80E01801":{"fault_time":1700000000456,"fault_level":"RestartBusiness"},'
        '"80E18005":{"fault_time":1700000000123,"fault_level":"RestartNPU"}}}'
    )
    assert decode_device(text) == DEVICE


def test_racks_and_other_kinds_of_chips() -> None:
    info = DeviceInfo(type="npu", available=("npu-0",), rack=4, other={"huawei.com/npu-2c": "npu-2c-100-1"})
    text = encode_device(info)
    assert text.endswith(',"RackID":4}') and '"huawei.com/npu":"npu-0"' in text
    assert decode_device(text) == info


def test_a_manual_isolation_has_no_code() -> None:
    text = encode_device(DeviceInfo(faults=(ChipFault("Ascend910-0", "ManuallySeparateNPU", "ManuallySeparateNPU"),)))
    assert '\\"fault_code\\":\\"\\"' in text
    assert decode_device(text).faults[0].code == "ManuallySeparateNPU"


def test_a_code_without_time_has_the_level_of_its_entry() -> None:
    [fault] = faultinfo.decode_faults('[{"npu_name":"a","fault_code":"X","fault_level":"RestartNPU"}]')
    assert fault == ChipFault("a", "X", "RestartNPU", 0, "")


def test_a_check_code_is_of_what_go_would_write() -> None:
    """Spaces and the order of keys are not content."""
    inner = '{"NodeStatus": "UnHealthy", "FaultDevList": null}'
    code = hashlib.sha256(b'{"FaultDevList":null,"NodeStatus":"UnHealthy"}').hexdigest()
    assert decode_node(f'{{"NodeInfo": {inner}, "CheckCode": "{code}"}}') == NodeInfo((), "UnHealthy")


@pytest.mark.parametrize("breaks", [
    lambda text: text.replace("Ascend910-0", "Ascend910-9"),
    lambda text: text.replace("1700000001", "1700000002"),
    lambda text: text.replace('"CheckCode":"', '"CheckCode":"0'),
    lambda text: text[: text.index('"CheckCode"')] + '"CheckCode":""}',
    lambda text: text[: text.index(',"CheckCode"')] + "}",
    lambda text: text[:-1],
    lambda text: "",
    lambda text: "[]",
    lambda text: "9" * 3_000_000,
    lambda text: "[" * 100_000,
    lambda text: '{"DeviceInfo":{"UpdateTime":99999999999999999999999},"CheckCode":"x"}',
])  # fmt: skip
def test_what_was_changed_on_the_way_is_refused(breaks) -> None:
    with pytest.raises(BadInfo):
        decode_device(breaks(encode_device(DEVICE)))


def test_go_escapes() -> None:
    assert go_json({"b": "<&>\u2028é", "a": '"\\\n\x01'}) == (
        '{"a":"\\"\\\\\\n\\u0001","b":"\\u003c\\u0026\\u003e\\u2028é"}'
    )
    info = NodeInfo((NodeFault("<&>", 1, ("\u2029",), "SeparateFault"),), "UnHealthy")
    assert "\\u003c\\u0026\\u003e" in encode_node(info)
    assert decode_node(encode_node(info)) == info


def test_nodes() -> None:
    info = NodeInfo((NodeFault("CPU", 1, ("00000011",), "SeparateFault"),), "UnHealthy")
    inner = (
        '{"FaultDevList":[{"DeviceType":"CPU","DeviceId":1,"FaultCode":["00000011"],"FaultLevel":"SeparateFault"}],'
        '"NodeStatus":"UnHealthy"}'
    )
    assert encode_node(info) == f'{{"NodeInfo":{inner},"CheckCode":"{hashlib.sha256(inner.encode()).hexdigest()}"}}'
    assert decode_node(encode_node(info)) == info
    with pytest.raises(BadInfo, match="CheckCode of NodeInfo is wrong"):
        decode_node(encode_node(info).replace("CPU", "Storage"))


def test_switches() -> None:
    code = "[0x08520003,na,L2,na]"
    info = SwitchInfo(
        (SwitchFault(code, "NotHandle", 1_700_000_000_123, chip=2, port=5, event_type=3, raised=1_700_000_000),),
        "NotHandle",
        "Healthy",
        1_700_000_001,
    )
    assert json.loads(encode_switch(info)) == {
        "FaultCode": [
            f'{{"EventType":3,"AssembledFaultCode":"{code}","PeerPortDevice":0,"PeerPortId":0,"SwitchChipId":2,'
            '"SwitchPortId":5,"Severity":0,"Assertion":0,"AlarmRaisedTime":1700000000}'
        ],
        "FaultLevel": "NotHandle",
        "UpdateTime": 1700000001,
        "NodeStatus": "Healthy",
        "FaultTimeAndLevelMap": {f"{code}_2_5": {"fault_time": 1700000000123, "fault_level": "NotHandle"}},
    }
    assert decode_switch(encode_switch(info)) == info


KEYS = [
    "DeviceInfo", "DeviceList", "UpdateTime", "CheckCode", "NodeInfo", "FaultDevList", "FaultCode",
    "FaultTimeAndLevelMap", "huawei.com/Ascend910-Fault",
]  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


def checked(value: object) -> str:
    code = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    return json.dumps({"DeviceInfo": value, "NodeInfo": value, "CheckCode": code})


@given(st.text() | st.builds(json.dumps, json_values) | st.builds(checked, json_values))
def test_garbage_is_refused_and_nothing_else(text: str) -> None:
    for decode in (decode_device, decode_node, decode_switch, faultinfo.decode_faults):
        with contextlib.suppress(BadInfo):
            decode(text)
