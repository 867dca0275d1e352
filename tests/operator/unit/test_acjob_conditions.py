"""The list of conditions: one of each type, the latest last, terminal ones for ever."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.acjob import conditions as c

START = datetime(2026, 1, 1, 10, tzinfo=timezone.utc)


def build(*steps: tuple[str, str, str]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for second, step in enumerate(steps):
        found = c.with_condition(found, *step, START + timedelta(seconds=second))
    return found


def kinds(conditions: list[dict[str, str]]) -> list[tuple[str, str, str]]:
    return [(each["type"], each["status"], each["reason"]) for each in conditions]


def test_fields_and_times_of_a_condition() -> None:
    assert build(("Created", "JobCreated", "Job a is create.")) == [
        {
            "type": "Created",
            "status": "True",
            "reason": "JobCreated",
            "message": "Job a is create.",
            "lastUpdateTime": "2026-01-01T10:00:00Z",
            "lastTransitionTime": "2026-01-01T10:00:00Z",
        }
    ]


def test_a_life() -> None:
    steps = [
        ("Created", "PodGroupPending", ""),
        ("Running", "JobRunning", ""),
        ("Restarting", "jobRestarting", ""),
        ("Running", "JobRunning", ""),
        ("Succeeded", "JobSucceeded", ""),
    ]
    assert kinds(build(*steps[:3])) == [("Created", "True", "PodGroupPending"), ("Restarting", "True", "jobRestarting")]
    assert kinds(build(*steps)) == [
        ("Created", "True", "PodGroupPending"),
        ("Running", "False", "JobRunning"),
        ("Succeeded", "True", "JobSucceeded"),
    ]


def test_a_new_reason_moves_the_condition_to_the_end_and_keeps_its_transition() -> None:
    found = build(("Created", "JobCreated", "a"), ("Running", "JobRunning", "b"), ("Created", "PodCreateFailed", "c"))
    assert [each["type"] for each in found] == ["Running", "Created"]
    assert found[-1]["lastTransitionTime"] == "2026-01-01T10:00:00Z"
    assert found[-1]["lastUpdateTime"] == "2026-01-01T10:00:02Z"


def test_the_same_again_changes_nothing() -> None:
    first = build(("Running", "JobRunning", "a"))
    assert c.with_condition(first, "Running", "JobRunning", "b", START + timedelta(hours=1)) == first


def test_the_number_of_restarts_left_is_kept_current() -> None:
    found = build(("Restarting", "jobRestarting", "<3>"), ("Restarting", "jobRestarting", "<2>"))
    assert [each["message"] for each in found] == ["<2>"]


@pytest.mark.parametrize("end", ["Succeeded", "Failed"])
@pytest.mark.parametrize("kind", ["Created", "Running", "Restarting", "Succeeded", "Failed"])
def test_the_end_is_final(end: str, kind: str) -> None:
    ended = build(("Running", "JobRunning", ""), (end, "x", ""))
    assert c.with_condition(ended, kind, "other", "other", START) == ended


step = st.tuples(
    st.sampled_from(["Created", "Running", "Restarting", "Succeeded", "Failed"]), st.sampled_from("ab"), st.just("")
)


@given(st.lists(step, max_size=12))
def test_always_one_of_a_type_and_the_last_one_true(steps: list[tuple[str, str, str]]) -> None:
    found = build(*steps)
    types = [each["type"] for each in found]
    assert len(types) == len(set(types))
    assert not {"Running", "Restarting"} <= set(types)
    if found:
        assert found[-1]["status"] == "True"
