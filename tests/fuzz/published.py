"""What nobody should publish: texts that are nearly right, of every kind that ClusterD or noded reads, what they have
written themselves among them.

Half of them are damaged in their meaning: any value at any place, and the CheckCode of what came of it, so that it is
read and believed. The others are damaged in their bytes.
"""

from __future__ import annotations

import json
import random
from typing import Any

from evertrain.clusterd.faults import outputs
from evertrain.clusterd.keep import Record
from evertrain.clusterd.recover import events
from evertrain.clusterd.recover.names import STATES
from evertrain.clusterd.recover.state import Data, Fresh
from evertrain.clusterd.recover.state import encode as encode_state
from evertrain.clusterd.resched import reasons
from evertrain.faultcodes import overrides
from evertrain.wire.faultinfo import (
    ChipFault,
    DeviceInfo,
    NodeFault,
    NodeInfo,
    SwitchFault,
    SwitchInfo,
    check_code,
    encode_device,
    encode_node,
    encode_switch,
)

NOW = 1_760_000_000_000
LEVELS = (
    "NotHandleFault", "SubHealthFault", "RestartRequest", "RestartBusiness", "FreeRestartNPU", "RestartNPU",
    "PreSeparateNPU", "SeparateNPU", "ManuallySeparateNPU", "NormalNPU", "", "NoSuchLevel",
)  # fmt: skip
CODES = ("80E18402", "80E01801", "80C98009", "8C1F860B", "81078603", "8C1F8608", "40F84E00", "", "x,y", "80E18402,")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64, 10**40, 0.5, -1e308, "", "0", "n0",
    "Ascend910-0", "Ascend910--1", "Ascend910-99999999999", "-", ",", ",,,", "\0", "\ud800", "é" * 50, "<>&", "%s{0}",
    "occur", "recover", "once", "NPU", "NaN", "{}", "[]", "null", [], {}, [[]], [None], [1, "1"], {"a": None}, {"": {}},
    "2026-01-01T00:00:00Z", "x" * 3000,
)  # fmt: skip
PUBLIC = {
    "id": "message-00000001",
    "timestamp": NOW,
    "version": "1.0",
    "resource": "CCAE",
    "faults": [
        {
            "faultId": "fault-00000001",
            "faultType": "NPU",
            "faultCode": "220001001",
            "faultTime": NOW,
            "assertion": "occur",
            "faultLocation": {"npuIp": "0.0.0.0"},
            "influence": [{"nodeName": "n0", "nodeSN": "", "deviceIds": [0, 1]}],
            "description": "so it is",
        }
    ],
}
POLICY = "enabled: true\nseparate:\n  fault_window_hours: 24\n  fault_threshold: 1\nrelease:\n  fault_free_hours: 1\n"
LISTED = {"Total": ["Ascend910-0"], "Detail": {"Ascend910-0": [
    {"FaultCode": "80E18402", "FaultLevel": "SeparateNPU", "LastSeparateTime": NOW}]}}  # fmt: skip
RELATIONS = [{"TriggerFault": "8C1F860B", "RelationFaults": ["81078603"], "FaultStrategy": "Separate"}]
DURATIONS = [{"FaultCode": "81078603", "FaultType": "faultDevice", "TimeOutInterval": 300}]
PUBLIC_CODES = {"publicFaultCode": {"NotHandleFaultCodes": ["000001001"], "SubHealthFaultCodes": ["010001002"],
                "SeparateNPUCodes": ["220001001"], "PreSeparateNPUCodes": []},
                "publicFaultResource": ["CCAE"]}  # fmt: skip
TABLE = {"status": "completed", "version": "1.0", "server_count": "1", "server_list": [
    {"device": [{"device_id": "0", "device_ip": "1.1.1.1", "rank_id": "0"}], "server_id": "1.1.1.1",
     "container_ip": "2.2.2.2"}], "super_pod_list": [
         {"super_pod_id": "0", "server_list": [{"server_id": "1.1.1.1"}]}]}  # fmt: skip


EFFECTS: tuple[events.Effect, ...] = (
    events.WriteReset("fault", (0, 1), recovery="1"), events.WriteReset("restartAllProcess", recovery="1"),
    events.PatchGroup({"a": "b"}, {"ProcessRecoverStatus": None}), events.PatchPod("pod", "a", {"fault-type": None}),
    events.ReplacePods(("a",), "so it is"), events.IsolateNode("n0", "so it is"), events.Note("closed", "so"),
)  # fmt: skip
RESET = {"RankList": [{"RankId": 0, "LogicId": 0, "Status": "fault", "Policy": "empty", "ErrorCode": [1]}],
         "UpdateTime": 1, "RetryTime": 0, "FaultFlushing": False, "GracefulExit": 0}  # fmt: skip
INJECTED = [
    {"kind": "chip", "code": "80E18402", "chip": 0, "since": NOW, "until": NOW + 1, "level": "SeparateNPU"},
    {"kind": "node", "code": "2C000031", "device": "CPU", "id": 1, "note": "so it is"},
    {"kind": "switch", "code": "[0x08520003,na,L2,na]", "chip": 0, "port": 3},
]
LEVEL_FILES: dict[str, Any] = {
    overrides.CHIP_FILE: {"NotHandleFaultCodes": ["80E01801"], "SeparateNPUCodes": ["80E18402"],
                          "PreSeparateNPUNetworkCodes": ["81078603"]},
    overrides.SWITCH_FILE: {"NotHandleFaultCodes": ["[0x08520003,na,L2,na]"], "SeparateFaultCodes": []},
    overrides.RULES_FILE: {
        "FaultFrequency": [{"EventId": ["80C98002"], "TimeWindow": 86400, "Times": 2, "FaultHandling": "SeparateNPU"}],
        "FaultDuration": [{"EventId": ["81078603"], "FaultTimeout": 20, "RecoverTimeout": 60,
                           "FaultHandling": "PreSeparateNPU"}]},
    overrides.NODE_FILE: {"FaultTypeCode": {"NotHandleFaultCodes": ["0100000D"], "PreSeparateFaultCodes": ["0000001D"],
                                            "SeparateFaultCodes": ["2C000031"]}},
}  # fmt: skip


class Damage:
    """All of it follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._long = False
        """The text has a list that is far too long. One is enough: nobody can publish more than a megabyte."""

    # Texts of each kind.

    def device(self) -> dict[str, str]:
        data = {"DeviceInfoCfg": self.damaged(encode_device(self.devices()), "DeviceInfo")}
        if self.random.random() < 0.3:
            data["SwitchInfoCfg"] = self.damaged(encode_switch(self.switch()))
        return data

    def node(self) -> dict[str, str]:
        pick = self.random
        faults = tuple(
            NodeFault(pick.choice(("CPU", "Storage", "", "NPU")), pick.randrange(-1, 9), (pick.choice(CODES),),
                      pick.choice(("SeparateFault", "PreSeparateFault", "NotHandleFault", "")))
            for _ in range(pick.randrange(3))
        )  # fmt: skip
        info = NodeInfo(faults, pick.choice(("Healthy", "UnHealthy", "PreSeparate", "SubHealthy", "?")))
        return {"NodeInfo": self.damaged(encode_node(info), "NodeInfo")}

    def devices(self) -> DeviceInfo:
        pick = self.random
        names = [f"Ascend910-{number}" for number in range(4)]
        faults = tuple(
            ChipFault(pick.choice(names), pick.choice(CODES), pick.choice(LEVELS),
                      pick.choice((0, NOW, NOW - pick.randrange(10**6), -5, 2**62)),
                      pick.choice(("CardUnhealthy", "CardNetworkUnhealthy", "PublicFault", "NodeUnhealthy", "")))
            for _ in range(pick.randrange(4))
        )  # fmt: skip
        cut = pick.randrange(5)
        return DeviceInfo(available=tuple(names[:cut]), unhealthy=tuple(names[cut:]), faults=faults, update_time=1,
                          super_pod=pick.choice((-2, 0, 3)))  # fmt: skip

    def switch(self) -> SwitchInfo:
        pick = self.random
        fault = SwitchFault(pick.choice(("[0x08520003,na,L2,na]", "x", "")), pick.choice(LEVELS), NOW, 1, 2)
        status = pick.choice(("Healthy", "UnHealthy", "PreSeparate", "SubHealthy"))
        return SwitchInfo((fault,) * pick.randrange(3), pick.choice(LEVELS), status, 1)

    def public(self) -> str:
        return self.damaged(json.dumps(PUBLIC))

    def public_message(self) -> object:
        self._long = False
        return self.meaning(PUBLIC)

    def policy(self) -> str:
        text = POLICY
        for _ in range(self.random.randrange(1, 3)):
            value = json.dumps(self.random.choice(VALUES))
            text = text.replace(self.random.choice(("true", "24", "1", "separate", "release")), value)
        return text if self.random.random() < 0.5 else self.bytes(text)

    def listed(self) -> dict[str, str]:
        return {self.random.choice(("n0", "n1", "nowhere", "")): self.damaged(json.dumps(LISTED))}

    def rules(self) -> tuple[str, str]:
        return self.damaged(json.dumps(RELATIONS)), self.damaged(json.dumps(DURATIONS))

    def public_codes(self) -> str:
        return self.damaged(json.dumps(PUBLIC_CODES))

    def table(self) -> str:
        return self.damaged(json.dumps(TABLE))

    def record(self, job: str) -> str:
        """What is kept of a recovery."""
        pick = self.random
        state = Data(
            state=pick.choice(sorted(STATES)), id="1", began=NOW / 1000, cause="so it is", uuid="u", clock=NOW / 1000,
            until=pick.choice((None, 0.0, NOW / 1000)), faults={0: "0", 1: "1"}, pods={0: "a"}, origin={0: "a", 1: "b"},
            hardware={0: True}, unreported={1}, handled={"x"}, labelled={"pod": "a"}, must_exit={0}, replaced={"a"},
            offered=["retry"], decided=pick.choice(("", "retry", "recover", "dump")), fresh={0: Fresh("a", 1.0)},
            order=pick.choice(("", "", "nic", "stress")), nics={0: True}, stress={0: (1, 2)},
        )  # fmt: skip
        record = Record(job, encode_state(state), tuple(pick.sample(EFFECTS, 2)), state.order, ("so",))
        return self.damaged(record.encode(NOW).decode())

    def reasons(self, job: str) -> str:
        text = reasons.recorded("", job, [("unhealthy", "pod-0", "n0", "0")], NOW / 1000, 0.0)
        assert text is not None
        return self.damaged(text)

    def report(self, node: str) -> tuple[str, str]:
        """One of ClusterD's reports for schedulers, and its name."""
        name, entry = self.random.choice(
            (
                ("cluster-info-device-7", outputs.device_entry(node, self.devices())),
                ("cluster-info-switch-7", outputs.switch_entry(node, self.switch())),
            )
        )
        return name, self.damaged("{" + entry + "}")

    def reset(self) -> dict[str, str]:
        return {"reset.json": self.damaged(json.dumps(RESET)), "checkCode": self.random.choice(("", "0" * 64, "é"))}

    def trace(self) -> str:
        return self.damaged(json.dumps({"CommunicationOperator": "on", "Step": "off"}))

    def injected(self) -> str:
        return self.damaged(json.dumps(INJECTED))

    def levels(self) -> dict[str, str]:
        """Of fault codes: what the two ConfigMaps of administrators have, by file."""
        return {file: self.damaged(json.dumps(content)) for file, content in LEVEL_FILES.items()}

    # Damage.

    def damaged(self, text: str, checked: str = "") -> str:
        """`checked`: the inner object that has a CheckCode."""
        self._long = False
        if self.random.random() < 0.4:
            return self.bytes(text)
        outer = json.loads(text)
        if not checked:
            return json.dumps(self.meaning(outer))
        inner = outer[checked]
        for key, value in (inner.get("DeviceList") or {}).items():
            if key.endswith("-Fault") and value and self.random.random() < 0.7:
                inner["DeviceList"][key] = self.damaged(value)
        if self.random.random() < 0.5:
            inner = self.meaning(inner)
        written = json.dumps(inner, separators=(",", ":"), ensure_ascii=self.random.random() < 0.5)
        rest = {key: value for key, value in outer.items() if key not in (checked, "CheckCode")}
        if self.random.random() < 0.2:
            rest = self.meaning(rest) or {}
        code = check_code(written.encode("utf-8", "surrogatepass"))
        others = "".join(f",{json.dumps(key)}:{json.dumps(value)}" for key, value in _items(rest))
        return f'{{"{checked}":{written},"CheckCode":"{code}"{others}}}'

    def meaning(self, value: Any) -> Any:
        """The same with other values at some places."""
        if self.random.random() < 0.08:
            return self.random.choice(VALUES)
        if isinstance(value, dict):
            found = {key: self.meaning(each) for key, each in value.items() if self.random.random() > 0.04}
            if self.random.random() < 0.05:
                found[self.random.choice(("", "x", "FaultCode", "\ud800"))] = self.random.choice(VALUES)
            return found
        if isinstance(value, list):
            times = self.random.choice((1, 1, 1, 1, 0, 2, 2 if self._long else 200))
            self._long |= times == 200
            return [self.meaning(each) for each in value] * times
        return value

    def bytes(self, text: str) -> str:
        changed = list(text)
        for _ in range(self.random.randrange(1, 5)):
            at = self.random.randrange(len(changed) + 1)
            match self.random.randrange(5):
                case 0:
                    changed[at : at + 1] = chr(self.random.randrange(256))
                case 1:
                    del changed[at:]
                case 2:
                    changed[at:at] = self.random.choice(("{", "[", '"', "\\u", "\\ud800", "e999", "-", "\0", "🙂"))
                case 3:
                    del changed[at : at + self.random.randrange(1, 20)]
                case 4:
                    changed[at:at] = self.random.choice(("[" * 3000, "9" * 5000, '{"a":' * 2000))
        return "".join(changed)


def _items(value: object) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []
