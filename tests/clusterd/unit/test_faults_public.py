"""Public faults: what is taken, how long it stays, and where it shows."""

from __future__ import annotations

import copy
import json
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.clusterd.faulting import MEMORY_LARGEST, _packed
from evertrain.clusterd.faults import public
from evertrain.clusterd.faults.inputs import KubeNode
from evertrain.clusterd.faults.public import MOST_DETAILS, PublicFaults
from evertrain.clusterd.faults.public_check import EARLIEST_MS, Refused, check
from evertrain.faultcodes.table import shipped
from tests.clusterd.faultworld import START, S, World, make_job

SEPARATE, PRE_SEPARATE, SUB_HEALTH, NOT_HANDLE = "220001001", "110001022", "010001001", "200001006"


def message(assertion: str = "occur", code: str = SEPARATE, node: str = "n0", devices=(0,), id: str = "fault-0001"):
    return {
        "id": "message-0001",
        "timestamp": START,
        "version": "1.0",
        "resource": "CCAE",
        "faults": [
            {
                "faultId": id,
                "faultType": "NPU",
                "faultCode": code,
                "faultTime": START,
                "assertion": assertion,
                "faultLocation": {"npuIp": "1.2.3.4"},
                "influence": [{"nodeName": node, "deviceIds": list(devices)}],
                "description": "dirty fibre",
            }
        ],
    }


def send(world: World, *args, **kwargs) -> None:
    assert world.centre.public(message(*args, **kwargs), world.now) == ""
    world.look()


@pytest.mark.parametrize(
    ("code", "level", "hits"),
    [
        (SEPARATE, "SeparateNPU", True),
        (PRE_SEPARATE, "PreSeparateNPU", False),
        (SUB_HEALTH, "SubHealthFault", True),
        (NOT_HANDLE, "NotHandleFault", False),
    ],
)
def test_a_public_fault_is_one_of_its_chips(code: str, level: str, hits: bool) -> None:
    world = World(make_job())
    send(world, code=code, devices=(0, 1))
    assert world.hit() == [(rank, code, level, "1") for rank in (0, 1) if hits]
    assert [fault.kind for fault in world.result.devices["n0"].faults] == ["PublicFault"] * 2
    separate = ("Ascend910-0", "Ascend910-1") if level == "SeparateNPU" else ()
    assert world.result.devices["n0"].unhealthy == separate
    at_all = level in ("SeparateNPU", "PreSeparateNPU")
    assert ("Ascend910-0" in world.result.devices["n0"].available) == (not at_all)


def test_it_recovers() -> None:
    world = World(make_job())
    send(world)
    world.at(7 * S)
    send(world, "recover")
    assert world.result.jobs == {} and world.result.devices["n0"].unhealthy == ()
    assert "Ascend910-0" in world.result.devices["n0"].available


def test_it_stays_for_five_seconds_at_least() -> None:
    world = World(make_job())
    send(world)
    world.at(S)
    send(world, "recover")
    assert world.ranks() and world.result.next_ms == START + 5 * S
    world.at(5 * S)
    assert world.ranks() == []


def test_once_is_five_seconds() -> None:
    world = World(make_job())
    send(world, "once")
    world.at(5 * S - 1)
    assert world.ranks()
    world.at(5 * S)
    assert world.ranks() == [] and world.result.next_ms is None


@pytest.mark.parametrize(("later", "lives"), [(3, False), (6, True)])
def test_a_recovery_that_overtakes_its_fault_waits_for_it(later: int, lives: bool) -> None:
    world = World(make_job())
    send(world, "recover")
    world.at(later * S)
    send(world)
    assert world.ranks()
    world.at(60 * S)
    assert bool(world.ranks()) == lives


def test_the_same_fault_again_is_no_news() -> None:
    world = World(make_job())
    send(world)
    send(world, code=SUB_HEALTH)
    assert world.hit() == [(0, SEPARATE, "SeparateNPU", "1")]


def test_a_node_that_does_not_publish_its_chips_shows_none_until_it_does() -> None:
    world = World(make_job(nodes=("n9",)))
    send(world, node="n9")
    assert "n9" not in world.result.devices and world.ranks() == []
    world.chips("n9")
    assert world.hit() == [(0, SEPARATE, "SeparateNPU", "1")]


def test_a_node_by_its_serial_number() -> None:
    world = World(make_job())
    one = message()
    one["faults"][0]["influence"] = [{"nodeSN": "SN1", "deviceIds": [1]}]
    assert "nodeSN" in world.centre.public(one, world.now)
    world.centre.k8s_nodes({"n0": KubeNode(True), "n1": KubeNode(True, serial="SN1")})
    assert world.centre.public(one, world.now) == ""
    world.look()
    assert world.hit() == [(3, SEPARATE, "SeparateNPU", "1")]


def test_public_faults_survive_a_restart_and_their_config_maps_are_not_read_twice() -> None:
    world = World(make_job())
    world.centre.public_config_map("ns/cm", json.dumps(message("once", id="once-00001")), world.now)
    world.centre.public_config_map("ns/other", json.dumps(message(devices=(1,))), world.now)
    world.look()
    assert len(world.ranks()) == 2
    world.at(2 * S)
    world.restart()
    assert len(world.ranks()) == 2
    world.at(5 * S)
    assert [fault.rank for fault in world.ranks()] == [1]
    world.restart()
    world.centre.public_config_map("ns/cm", json.dumps(message("once", id="once-00001")), world.now)
    world.look()
    assert [fault.rank for fault in world.ranks()] == [1]
    world.centre.public_config_map("ns/cm", "{", world.now)
    assert world.look().complaints


def test_what_is_remembered_of_config_maps_is_bounded_and_ends_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "MOST_TEXTS", 3)
    world = World(make_job())
    texts = world.centre._pipeline.public.state.texts
    for number in range(3):
        world.centre.public_config_map(f"ns/{number}", json.dumps(message(id=f"fault-{number:05}")), world.now)
    world.centre.public_config_map("ns/0", json.dumps(message(id="fault-00009")), world.now)
    world.centre.public_config_map("ns/3", json.dumps(message(id="fault-00003")), world.now)
    assert list(texts) == ["ns/2", "ns/0", "ns/3"], "the oldest word is forgotten first"
    world.centre.public_config_map_gone("ns/0")
    world.centre.public_config_map_gone("ns/unknown")
    world.look()
    assert list(texts) == ["ns/2", "ns/3"] and len(world.ranks()) == 1, "what it said stays"
    world.restart()
    world.centre.public_config_maps({"ns/3", "ns/4"})
    assert list(world.centre._pipeline.public.state.texts) == ["ns/3"]


def test_what_is_remembered_of_config_maps_leaves_room_for_faults() -> None:
    world = World()
    for number in range(public.MOST_TEXTS + 10):
        world.centre.public_config_map(f"mindx-dl/public-fault-{uuid.UUID(int=number * 7**40)}", "{", world.now)
    assert len(_packed(world.centre.dump())) < MEMORY_LARGEST / 3


def test_statistics() -> None:
    world = World(make_job())
    assert world.result.statistics == {"PublicFaults": "{}", "FaultNum": '{"publicFaultNum":0}'}
    send(world, devices=(3, 1))
    assert json.loads(world.result.statistics["PublicFaults"]) == {
        "n0": [
            {"resource": "CCAE", "devIds": [3, 1], "faultId": "fault-0001", "type": "NPU", "faultCode": SEPARATE,
             "level": "SeparateNPU", "faultTime": START}
        ]
    }  # fmt: skip
    before = world.result.statistics
    many = message()
    [fault] = many["faults"]
    for start in range(0, MOST_DETAILS, 100):
        many["faults"] = [copy.deepcopy(fault) | {"faultId": f"fault-{start + each:08}"} for each in range(100)]
        assert world.centre.public(many, world.now) == ""
    result = world.look()
    assert result.statistics["FaultNum"] == f'{{"publicFaultNum":{MOST_DETAILS + 1}}}'
    assert result.statistics["Description"] and result.statistics["PublicFaults"] == before["PublicFaults"]


def test_statistics_that_are_too_long_for_a_config_map() -> None:
    world = World(make_job())
    many = message(devices=tuple(range(16)))
    [fault] = many["faults"]
    for start in range(0, MOST_DETAILS - 100, 100):
        ids = [f"{start + each:08}".rjust(100, "f") for each in range(100)]
        many["faults"] = [copy.deepcopy(fault) | {"faultId": each} for each in ids]
        assert world.centre.public(many, world.now) == ""
        if start % 800 and start < MOST_DETAILS - 200:
            continue  # a look at all of them takes its time
        found = world.look().statistics
        assert len(found["PublicFaults"]) <= 1000 * 1000
    assert "too long" in found["Description"] and json.loads(found["PublicFaults"])


def test_no_more_than_fifty_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evertrain.clusterd.faults.public.MOST", 3)
    world = World(make_job())
    for number in range(3):
        send(world, id=f"fault-{number:08}")
    assert "already" in world.centre.public(message(id="fault-one-more"), world.now)
    send(world, id="fault-00000001")


def change(path: str, value: object):
    def changed():
        one = message()
        *inner, last = path.split(".")
        at: object = one
        for key in inner:
            at = at[int(key)] if isinstance(at, list) else at[key]  # type: ignore[index,call-overload]
        if value is DELETED:
            del at[last]  # type: ignore[attr-defined]
        else:
            at[last] = value  # type: ignore[index]
        return one

    return changed


DELETED = object()
F, AT = "faults.0", "faults.0.influence.0"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", "short"),
        ("id", "x" * 129),
        ("id", "bad id bad"),
        ("id", DELETED),
        ("timestamp", EARLIEST_MS - 1),
        ("timestamp", 10**13),
        ("timestamp", str(START)),
        ("timestamp", True),
        ("version", "1.1"),
        ("resource", "me"),
        ("resource", ["CCAE"]),
        ("faults", []),
        ("faults", {}),
        ("faults", [{}] * 101),
        (f"{F}.faultId", "1"),
        (f"{F}.faultType", "Disk"),
        (f"{F}.faultCode", "999999999"),
        (f"{F}.faultCode", 220001001),
        (f"{F}.faultTime", 1),
        (f"{F}.assertion", "maybe"),
        (f"{F}.faultLocation", {str(number): "x" for number in range(11)}),
        (f"{F}.faultLocation", {"x" * 17: "x"}),
        (f"{F}.faultLocation", {"x": "x" * 129}),
        (f"{F}.influence", []),
        (f"{F}.influence", [{}] * 1001),
        (f"{F}.description", "x" * 513),
        (f"{F}.description", "two\nlines"),
        (f"{AT}.nodeName", "Not_A_Node"),
        (f"{AT}.nodeName", "-n0"),
        (f"{AT}.nodeName", "n" * 254),
        (f"{AT}.nodeName", DELETED),
        (f"{AT}.deviceIds", []),
        (f"{AT}.deviceIds", [0, 0]),
        (f"{AT}.deviceIds", [32]),
        (f"{AT}.deviceIds", [-1]),
        (f"{AT}.deviceIds", [True]),
        (f"{AT}.deviceIds", list(range(33))),
    ],
)
def test_what_breaks_a_rule_is_refused(path: str, value: object) -> None:
    with pytest.raises(Refused) as refused:
        check(change(path, value)(), shipped(), lambda serial: None)
    assert str(refused.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("timestamp", EARLIEST_MS),
        (f"{F}.faultLocation", DELETED),
        (f"{F}.faultLocation", {}),
        (f"{F}.description", ""),
        (f"{F}.description", DELETED),
        (f"{AT}.nodeName", "n"),
        (f"{AT}.nodeName", "node-1.example"),
        (f"{AT}.deviceIds", list(range(32))),
    ],
)
def test_what_keeps_them_is_taken(path: str, value: object) -> None:
    assert check(change(path, value)(), shipped(), lambda serial: None).faults


def test_faults_that_break_a_rule_are_left_out_of_their_message() -> None:
    one = message()
    one["faults"].append({**one["faults"][0], "faultId": "1"})
    world = World(make_job())
    assert world.centre.public(one, world.now) == ""
    assert world.look().complaints and len(world.ranks()) == 1


KEYS = [*message(), *message()["faults"][0]]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.just(START),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=10,
)


@given(st.lists(st.one_of(
    values,
    st.builds(lambda key, value: message() | {key: value}, st.sampled_from(list(message())), values),
    st.builds(lambda key, value: message() | {"faults": [message()["faults"][0] | {key: value}]},
              st.sampled_from(list(message()["faults"][0])), values),
    st.builds(message, st.sampled_from(["occur", "recover", "once"]), id=st.sampled_from(["fault-0001", "fault-0002"])),
), max_size=6), st.lists(st.integers(0, 20_000), max_size=6))  # fmt: skip
def test_garbage_is_refused_and_what_comes_goes(messages: list[object], times: list[int]) -> None:
    faults = PublicFaults(shipped())
    now = START
    for one, step in zip(messages, [*times, *[0] * 6], strict=False):
        now += step
        faults.receive(one, lambda serial: None, now)
        try:
            text = json.dumps(one)
        except ValueError:
            continue
        faults.config_map("cm", text, lambda serial: None, now)
        faults.advance(now)
        assert faults.count == sum(map(len, faults.state.nodes.values()))
        when = faults.next_ms()
        assert when is None or when > now
    for key in ("fault-0001", "fault-0002"):
        faults.receive(message("recover", id=key), lambda serial: None, now)
    now += 5_000
    faults.advance(now)
    faults.advance(now + 5_000)
    assert faults.count == 0 or all(
        entry.id not in ("fault-0001", "fault-0002") for node in faults.state.nodes.values() for entry in node.values()
    )


@pytest.mark.parametrize("by", [-5000 * S, 5000 * S])
def test_a_fault_that_occurs_once_goes_in_its_time_though_the_clock_is_set(by: int) -> None:
    world = World(make_job())
    send(world, "once")
    world.at(2 * S)
    world.set_clock(by)
    world.at(by + 5 * S - 1)
    assert len(world.ranks()) == 1
    world.at(by + 5 * S)
    assert world.ranks() == []


@pytest.mark.parametrize("by", [-5000 * S, 5000 * S])
def test_a_recovery_that_is_early_waits_as_long_when_the_clock_is_set(by: int) -> None:
    world = World(make_job())
    send(world, "recover")
    world.set_clock(by)
    world.at(by + 2 * S)
    send(world)
    assert len(world.ranks()) == 1
    world.at(by + 5 * S)
    assert len(world.ranks()) == 1, "for 5 s at least"
    world.at(by + 7 * S)
    assert world.ranks() == []
