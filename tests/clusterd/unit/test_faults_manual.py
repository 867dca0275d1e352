"""Chips whose faults come often are isolated, and released again."""

from __future__ import annotations

import json

import pytest

from evertrain.clusterd.faults.manual import Policy, read_policy
from tests.clusterd.faultworld import START, S, World, chip, make_job

HOUR = 3_600_000
CODE = "80E18005"
POLICY = """
enabled: true
separate:
  fault_window_hours: 24
  fault_threshold: 2
release:
  fault_free_hours: 48
"""


def world_with(policy: str | None = POLICY, *jobs) -> World:
    world = World(*(jobs or [make_job()]))
    world.centre.manual_policy(policy)
    world.look()
    return world


def comes(world: World, when: int, node: str = "n0", number: int = 0, level: str = "RestartNPU") -> None:
    """A fault comes, and is gone a minute later."""
    world.at(when)
    world.chips(node, chip(number, CODE, level, world.now))
    world.at(when + 60 * S)
    world.chips(node)


def test_a_fault_that_comes_too_often_isolates_its_chip() -> None:
    world = world_with()
    comes(world, 0)
    assert world.result.manual == {} and world.result.devices["n0"].unhealthy == ()
    world.at(HOUR)
    world.chips("n0", chip(0, CODE, "RestartNPU", world.now))
    world.at(HOUR + 30 * S - 1)
    assert world.result.manual == {}, "it may be the job's own doing yet"
    world.at(HOUR + 30 * S)
    assert json.loads(world.result.manual["n0"]) == {
        "Total": ["Ascend910-0"],
        "Detail": {
            "Ascend910-0": [{"FaultCode": CODE, "FaultLevel": "RestartNPU", "LastSeparateTime": START + HOUR + 30 * S}]
        },
    }
    assert world.result.manual["n0"].startswith('{"Total"')
    world.chips("n0")
    assert world.codes("n0") == [("ManuallySeparateNPU", "ManuallySeparateNPU")]
    assert world.result.devices["n0"].unhealthy == ("Ascend910-0",)
    assert "Ascend910-0" not in world.result.devices["n0"].available
    assert world.hit() == [(0, "ManuallySeparateNPU", "ManuallySeparateNPU", "1")]
    assert world.result.isolated["n0"].chips == {"Ascend910-0": "ManuallySeparateNPU"}


def test_it_is_released_when_it_was_free_of_the_fault_for_long_enough() -> None:
    world = world_with()
    comes(world, 0)
    comes(world, HOUR)
    comes(world, 10 * HOUR)
    world.at(58 * HOUR - 1)
    assert world.result.manual
    world.at(58 * HOUR)
    assert world.result.manual == {} and world.codes("n0") == [] and world.result.jobs == {}
    comes(world, 59 * HOUR)
    assert world.result.manual == {}, "it is counted anew"


def test_it_is_released_by_hand() -> None:
    world = world_with()
    comes(world, 0)
    comes(world, HOUR)
    written = dict(world.result.manual)
    world.centre.manual_listed({})
    assert world.look().manual, "it was not written yet"
    world.centre.manual_listed(written)
    assert world.look().manual == written
    world.centre.manual_listed({"n0": json.dumps({"Total": [], "Detail": {}})})
    assert world.look().manual == {} and world.codes("n0") == []
    comes(world, 2 * HOUR)
    assert world.result.manual == {}


def test_the_config_map_is_deleted_by_hand() -> None:
    world = world_with()
    comes(world, 0)
    comes(world, HOUR)
    world.centre.manual_listed(world.result.manual)
    world.centre.manual_listed(None)
    assert world.look().manual == {}


def test_what_was_isolated_before_nobody_remembers_it_stays_so() -> None:
    world = world_with()
    world.centre.manual_listed(
        {"n0": '{"Total":["Ascend910-1"]}', "n1": "garbage", "gone": '{"Total":["Ascend910-1"]}'}
    )
    world.look()
    assert world.codes("n0") == [("ManuallySeparateNPU", "ManuallySeparateNPU")]
    assert set(world.result.manual) == {"n0", "gone"}


def test_the_same_fault_on_another_chip_of_the_job_is_the_jobs_own_doing() -> None:
    world = world_with()
    for when in (0, HOUR, 2 * HOUR):
        world.at(when)
        world.chips("n0", chip(0, CODE, "RestartNPU", world.now))
        world.at(when + 29 * S)
        world.chips("n1", chip(1, CODE, "RestartNPU", world.now))
        world.at(when + 200 * S)
        world.chips("n0")
        world.chips("n1")
    assert world.result.manual == {}


def test_the_same_fault_of_another_job_or_much_later_counts() -> None:
    world = world_with(POLICY, make_job(), make_job("other", nodes=("n2",)))
    for when in (0, HOUR):
        world.at(when)
        world.chips("n0", chip(0, CODE, "RestartNPU", world.now))
        world.chips("n2", chip(0, CODE, "RestartNPU", world.now))
        world.at(when + 31 * S)
        world.chips("n1", chip(1, CODE, "RestartNPU", world.now))
        world.at(when + 200 * S)
        for node in ("n0", "n1", "n2"):
            world.chips(node)
    assert set(world.result.manual) == {"n0", "n1", "n2"}


@pytest.mark.parametrize("level", ["NotHandleFault", "SubHealthFault"])
def test_harmless_faults_do_not_count(level: str) -> None:
    world = world_with()
    for hour in range(5):
        comes(world, hour * HOUR, level=level)
    assert world.result.manual == {}


def test_chips_that_nobody_has_and_faults_long_ago_and_faults_that_stay_do_not_count() -> None:
    world = world_with()
    for hour in range(5):
        comes(world, hour * HOUR, node="n2")
    comes(world, 6 * HOUR)
    comes(world, 31 * HOUR)
    world.chips("n1", chip(0, CODE, "RestartNPU", world.now))
    for minute in range(5):
        world.at(40 * HOUR + minute * 60 * S)
        world.chips(
            "n1", chip(0, CODE, "RestartNPU", START + 31 * HOUR + 60 * S), chip(1, "X", "SubHealthFault", minute)
        )
    assert world.result.manual == {}


def test_counts_survive_a_restart() -> None:
    world = world_with()
    comes(world, 0)
    world.at(HOUR)
    world.chips("n0", chip(0, CODE, "RestartNPU", world.now))
    world.restart()
    world.centre.manual_policy(POLICY)
    world.look()
    world.at(HOUR + 30 * S)
    assert set(world.result.manual) == {"n0"}
    world.restart()
    world.centre.manual_policy(POLICY)
    assert set(world.look().manual) == {"n0"}
    assert ("ManuallySeparateNPU", "ManuallySeparateNPU") in world.codes("n0")


def test_until_somebody_says_what_the_policy_is_what_was_isolated_stays_so() -> None:
    world = world_with()
    comes(world, 0)
    comes(world, HOUR)
    comes(world, 2 * HOUR)
    world.restart()
    world.at(200 * HOUR)
    assert world.result.manual
    world.centre.manual_policy(None)
    assert world.look().manual == {}


@pytest.mark.parametrize("policy", [None, "enabled: false"])
def test_without_a_policy_nothing_is_isolated(policy: str | None) -> None:
    world = world_with()
    comes(world, 0)
    comes(world, HOUR)
    assert world.result.manual
    world.centre.manual_policy(policy)
    assert world.look().manual == {} and world.codes("n0") == []
    for hour in range(2, 6):
        comes(world, hour * HOUR)
    assert world.result.manual == {}


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("enabled: true", Policy(True, 24, 3, 48)),
        ("enabled: true\nrelease: {fault_free_hours: -1}", Policy(True, 24, 3, -1)),
        ("enabled: true\nseparate: {fault_window_hours: 720, fault_threshold: 50}", Policy(True, 720, 50, 48)),
        ("{}", Policy()),
    ],
)
def test_policies(text: str, policy: Policy) -> None:
    assert read_policy(text) == (policy, [])


@pytest.mark.parametrize("text", [
    "", "a: [", "[]", "enabled: yes please", "enabled: true\nseparate: {fault_window_hours: 721}",
    "enabled: true\nseparate: {fault_threshold: 0}", "enabled: true\nseparate: {fault_threshold: true}",
    "enabled: true\nrelease: {fault_free_hours: 0}", "enabled: true\nrelease: [1]", "!!python/object:os.system x",
])  # fmt: skip
def test_policies_that_cannot_be_used(text: str) -> None:
    policy, wrong = read_policy(text)
    assert policy is None and wrong


@pytest.mark.parametrize("text", ["enabled: 3", POLICY.replace("24", "24h"), "a: [", ""])
def test_a_policy_that_cannot_be_used_changes_nothing(text: str) -> None:
    world = world_with()
    comes(world, 0)
    comes(world, HOUR)
    before = world.result.manual
    world.centre.manual_policy(text)
    world.look()
    assert world.result.manual == before != {}
    assert any("the policy before stays in force" in each for each in world.result.complaints)
    comes(world, 2 * HOUR, number=1)
    comes(world, 3 * HOUR, number=1)
    assert "Ascend910-1" in world.result.manual["n0"], "chips are isolated as before"
    world.restart()
    world.centre.manual_policy(text)
    assert set(world.look().manual) == {"n0"}, "nor does it after a restart"


def test_never_released_by_time() -> None:
    world = world_with(POLICY.replace("48", "-1"))
    comes(world, 0)
    comes(world, HOUR)
    world.at(9999 * HOUR)
    assert world.result.manual


@pytest.mark.parametrize("by", [-1000 * HOUR, 1000 * HOUR])
def test_a_clock_that_is_set_neither_releases_nor_isolates(by: int) -> None:
    world = world_with()
    comes(world, 0)
    world.at(HOUR)
    world.chips("n0", chip(0, CODE, "RestartNPU", world.now))
    world.at(HOUR + 10 * S)
    world.set_clock(by)
    world.at(by + HOUR + 30 * S - 1)
    assert world.result.manual == {}
    world.at(by + HOUR + 30 * S)
    assert set(world.result.manual) == {"n0"}, "twice within a day"
    world.set_clock(-by)
    world.chips("n0")
    (detail,) = json.loads(world.result.manual["n0"])["Detail"]["Ascend910-0"]
    assert detail["LastSeparateTime"] == START + HOUR + 30 * S
    world.at(49 * HOUR + 30 * S - 1)
    assert set(world.result.manual) == {"n0"}
    world.at(49 * HOUR + 30 * S)
    assert world.result.manual == {}
