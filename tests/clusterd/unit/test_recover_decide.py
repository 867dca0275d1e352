"""What a job wants, and which strategy follows from it: decisions with their reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evertrain.clusterd.model import Job, Pod
from evertrain.clusterd.recover import config as configs
from evertrain.clusterd.recover import names as n
from evertrain.clusterd.recover.decide import Situation, decide, only_dump
from tests.clusterd.recover_world import ALL, World

EVERYTHING = (n.RETRY, n.RECOVER, n.DOWNGRADE, n.UPGRADE, n.DUMP, n.EXIT)


def config(strategies: str = ALL, **fields: object) -> configs.Config:
    job = Job("u", "j", "d", labels={"process-recover-enable": "on"}, annotations={"recover-strategy": strategies})
    return configs.of(replace(job, **fields))  # type: ignore[arg-type]


def chosen(strategies: str = ALL, **fields: object) -> str:
    situation = Situation(config(strategies), offered=EVERYTHING)
    return decide(replace(situation, **fields)).strategy  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("recover,retry", (n.RETRY, n.RECOVER, n.EXIT)),
        (" dump , recover-in-place ,, nonsense", (n.IN_PLACE, n.DUMP, n.EXIT)),
        ("", (n.EXIT,)),
        ("exit,exit,retry,retry", (n.RETRY, n.EXIT)),
    ],
)
def test_strategies_are_trimmed_sorted_and_known(text: str, expected: tuple[str, ...]) -> None:
    assert config(text).strategies == expected


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"fault-scheduling": "grace"}, ("job-rescheduling",)),
        ({"fault-scheduling": "force", "pod-rescheduling": "on"}, ("job-rescheduling", "pod-rescheduling")),
        ({"fault-scheduling": "off", "pod-rescheduling": "off"}, ()),
    ],
)
def test_rescheduling_is_a_strategy_too(labels: dict[str, str], expected: tuple[str, ...]) -> None:
    found = config("recover", labels=labels)
    assert found.strategies == (n.RECOVER, n.EXIT, *expected)
    assert found.reschedules == bool(expected)


@pytest.mark.parametrize(
    ("label", "hot", "enabled", "in_charge"),
    [("on", "", True, True), ("pause", "", True, True), ("off", "", False, False), ("off", "hotSwitch", False, True)],
)
def test_who_may_register(label: str, hot: str, enabled: bool, in_charge: bool) -> None:
    found = config(labels={"process-recover-enable": label, "subHealthyStrategy": hot})
    assert (found.enabled, found.in_charge) == (enabled, in_charge)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("270", 270), ("29", 270), ("271", 270), ("x", 270), ("", 270), ("-40", 270)]
)
def test_how_long_to_wait_for_pods(text: str, seconds: float) -> None:
    assert config(annotations={"wait-reschedule-timeout": text}).reschedule_wait == seconds


@pytest.mark.parametrize(("text", "seconds"), [("", 20), ("60", 50), ("10", 0), ("9", 20), ("3601", 20), ("x", 20)])
def test_how_long_to_look_for_a_spare(text: str, seconds: float) -> None:
    assert config(pods={0: Pod(0, "u", "p", env={"MINDIO_WAIT_MINDX_TIME": text})}).elastic_probe == seconds


def test_the_framework_may_be_said_in_two_places() -> None:
    assert config(framework="PyTorch").framework == "pytorch"
    assert config(framework="pytorch", labels={"framework": "mindspore"}).framework == "mindspore"


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        ({"retryable": True, "in_place": True}, n.RETRY),
        ({"in_place": True}, n.IN_PLACE),
        ({}, n.RECOVER),
        ({"retryable": True, "offered": (n.RECOVER, n.DUMP)}, n.RECOVER),
        ({"offered": (n.DOWNGRADE, n.DUMP)}, n.ELASTIC),
        ({"offered": (n.DOWNGRADE, n.DUMP), "first_pod": True}, n.DUMP),
        ({"offered": (n.DOWNGRADE, n.DUMP), "spare": True}, n.DUMP),
        ({"offered": (n.DUMP,)}, n.DUMP),
        ({"offered": ()}, n.EXIT),
        ({"after": n.RETRY, "retryable": True}, n.RECOVER),
        ({"after": n.RETRY, "in_place": True}, n.IN_PLACE),
        ({"after": n.RECOVER}, n.DUMP),
        ({"after": n.RECOVER, "unscheduled": True}, n.ELASTIC),
        ({"after": n.RECOVER, "unscheduled": True, "first_pod": True}, n.DUMP),
        ({"after": n.ELASTIC}, n.DUMP),
        ({"after": n.UPGRADE}, n.DUMP),
        ({"after": n.DUMP}, n.EXIT),
    ],
)
def test_the_finest_that_can_be(situation: dict[str, object], expected: str) -> None:
    assert chosen(**situation) == expected


@pytest.mark.parametrize("missing", [n.RETRY, n.IN_PLACE, n.RECOVER, n.ELASTIC, n.DUMP])
def test_what_is_not_configured_is_not_chosen(missing: str) -> None:
    rest = [each for each in n.LADDER if each != missing]
    assert chosen(",".join(rest), retryable=True, in_place=True) != missing


@pytest.mark.parametrize(
    ("wish", "expected"),
    [("retry", n.RETRY), ("recover", n.IN_PLACE), ("dump", n.DUMP), ("exit", n.EXIT), ("", n.EXIT)],
)
def test_a_platform_has_the_last_word(wish: str, expected: str) -> None:
    strategies = "retry,recover-in-place,recover,dump"
    asked = config(annotations={"recover-strategy": strategies, "ProcessRecoverStrategy": wish})
    situation = Situation(asked, EVERYTHING, retryable=True, in_place=True, platform=wish)
    assert decide(situation).strategy == expected


def test_the_reason_says_why_nothing_finer() -> None:
    decision = decide(Situation(config("retry,recover,dump"), offered=(n.DUMP,)))
    assert decision.strategy == n.DUMP
    assert "retry: running the step again does not mend these faults" in decision.explanation
    assert "recover-in-place: not configured" in decision.explanation
    assert "recover: the training does not offer it" in decision.explanation


def test_only_a_checkpoint_is_wanted() -> None:
    assert only_dump(config("dump"), "")
    assert not only_dump(config("dump,recover"), "")
    assert not only_dump(config("exit"), "")
    assert not only_dump(config("dump", labels={}), "")
    asked = config(annotations={"recover-strategy": "recover,dump", "ProcessRecoverStrategy": "dump"})
    assert only_dump(asked, "dump")
    assert not only_dump(asked, "recover")


def test_the_job_as_it_is_now_counts() -> None:
    """Not as it was when its client came."""
    from evertrain.clusterd.model import OTHER
    from evertrain.clusterd.recover.events import ProcessFault

    world = World("recover")
    world.annotate(**{"recover-strategy": "dump"})
    world.say(ProcessFault({3: OTHER}))
    assert world.transcript[0][0] == "saveAndExit"
