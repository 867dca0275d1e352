"""Incidents from notes: phases that add up, restarts in the middle, bounds; what is told as Events of a job."""

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as some

from evertrain.clusterd.model import Job, RankFault
from evertrain.clusterd.recover.events import Note
from evertrain.clusterd.timeline import history as published
from evertrain.clusterd.timeline import incident as bounds
from evertrain.clusterd.timeline.history import History, Unreadable, config_map, decoded, encoded
from evertrain.clusterd.timeline.incident import ABANDONED, JOB_GONE, Fault, Incident, fold
from evertrain.clusterd.timeline.shell import Timeline
from evertrain.clusterd.timeline.words import event, words
from evertrain.kube.events import BURST, REFILL_SECONDS, SIMILAR, Correlator, Words
from evertrain.kube.port import CONFIG_MAP, ApiError, Kind
from tests import virtual_time
from tests.kube.fake import FakeKube

JOB = Job(uid="u-1", name="bert", namespace="team")

RECOVERY = [
    (0, Note("opened", "rank 3 failed", {"id": "AB-1"})),
    (5, Note("fault", "killed", {"rank": 3, "type": "1", "code": "80E01801", "node": "n1", "device": "2"})),
    (40, Note("phase", "stop", {})),
    (90, Note("phase", "decide", {})),
    (95, Note("decision", "its process is lost, a spare is there", {"strategy": "recover-in-place"})),
    (96, Note("phase", "rebuild", {})),
    (400, Note("fallback", "it did not start (406)", {"from": "recover-in-place", "to": "recover"})),
    (401, Note("decision", "the pod is replaced", {"strategy": "recover"})),
    (402, Note("phase", "stop", {})),
    (500, Note("phase", "rebuild", {})),
    (720, Note("closed", "all ranks train", {"outcome": "recovered", "ok": True})),
]


def told(notes, job=JOB, base=1_700_000_000_000, kept=None):
    kept = kept or History()
    for at, note in notes:
        kept.note(job, note, base + at)
    return kept.of(job.uid)


def test_an_incident_has_faults_decision_fallbacks_phases_and_outcome():
    (incident,) = told(RECOVERY)
    assert incident.id == "AB-1" and incident.cause == "rank 3 failed"
    assert incident.faults == (Fault(3, "1", "80E01801", "", "n1", "2", "killed"),)
    assert (incident.decision, incident.reason) == ("recover", "the pod is replaced")
    assert incident.durations == [
        ("detect", 40),
        ("stop", 50),
        ("decide", 6),
        ("rebuild", 306),
        ("stop", 98),
        ("rebuild", 220),
    ]
    assert incident.total_ms == 720
    (fallback,) = incident.fallbacks
    assert (fallback.left, fallback.taken, fallback.reason) == ("recover-in-place", "recover", "it did not start (406)")
    assert incident.closed and incident.ok and incident.outcome == "recovered"
    record = incident.record()
    assert record["phases_ms"] == {"detect": 40, "stop": 148, "decide": 6, "rebuild": 526}
    assert record["opened"] == "2023-11-14T22:13:20.000Z" and record["closed"] == "2023-11-14T22:13:20.720Z"


KINDS = ("opened", "fault", "decision", "phase", "fallback", "closed", "ignored", "")
DETAILS = some.dictionaries(
    some.sampled_from(["id", "rank", "type", "faults", "strategy", "outcome", "ok", "from", "phase"]),
    some.none() | some.integers() | some.booleans() | some.text(max_size=3) | some.lists(some.integers(), max_size=3),
)
NOTES = some.builds(Note, some.sampled_from(KINDS), some.sampled_from(["", "stop", "repair", "\udc80"]), DETAILS)


@settings(max_examples=300, deadline=None)
@given(some.lists(some.tuples(some.integers(0, 10_000), NOTES), max_size=40), some.booleans())
def test_phases_add_up_whatever_is_noted_and_whatever_the_clock_does(notes, restarted):
    kept = History()
    for at, note in notes:
        kept.note(JOB, note, at)
        if restarted:  # everything is forgotten but for what was written
            incidents = decoded({published.KEY: encoded(kept.of(JOB.uid))})
            assert incidents == kept.of(JOB.uid)
            kept = History()
            kept.restore(incidents)
    incidents = kept.of(JOB.uid)
    assert all(each.closed for each in incidents[:-1]), "one is open at most"
    for each in incidents:
        assert sum(duration for _, duration in each.durations) == each.total_ms
        assert all(duration >= 0 for _, duration in each.durations)
        assert each.record()["total_ms"] == sum(each.record()["phases_ms"].values())


def test_a_restart_goes_on_with_the_same_incident():
    whole = told(RECOVERY)
    for cut in range(1, len(RECOVERY)):
        first = told(RECOVERY[:cut])
        again = History()
        again.restore(decoded(config_map(JOB, first)["data"], JOB.uid))
        assert told(RECOVERY[cut:], kept=again) == whole


def test_what_another_version_has_written_besides_is_no_hindrance():
    incidents = told(RECOVERY)
    text = encoded(incidents).replace('"outcome":', '"steps_lost":null,"outcome":')
    assert "steps_lost" in text and decoded({published.KEY: text}) == incidents


def test_a_recovery_that_is_opened_again_under_its_id_is_the_same_and_an_echo_of_a_closed_one_is_none():
    again = [*RECOVERY[:4], (93, Note("opened", "the client is back", {"id": "AB-1"})), *RECOVERY[4:]]
    assert len(told(again)) == 1
    echoed = [
        *RECOVERY,
        (730, Note("opened", "rank 3 failed", {"id": "AB-1"})),
        (740, Note("phase", "x", {"id": "AB-1"})),
    ]
    assert told(echoed) == told(RECOVERY)


def test_the_end_brings_what_a_clusterd_that_was_killed_had_no_time_to_write_down():
    essence = {
        "began": 1_700_000_000.0,
        "cause": "rank 3 failed",
        "strategy": "recover",
        "reason": "the pod is replaced",
    }
    end = (720, Note("closed", "all ranks train", {"id": "AB-1", "outcome": "recovered", "ok": True, **essence}))
    for heard in ([], RECOVERY[:1], RECOVERY[:3], RECOVERY[:-1], [*RECOVERY[:-1], end]):
        (incident,) = told([*heard, end])
        assert (incident.id, incident.cause, incident.total_ms) == ("AB-1", "rank 3 failed", 720)
        assert (incident.decision, incident.reason) == ("recover", "the pod is replaced")
        assert incident.closed and incident.ok and incident.outcome == "recovered"


def test_one_that_never_ended_is_abandoned_when_the_next_begins():
    first, second = told([*RECOVERY[:4], (1000, Note("opened", "rank 1 failed", {"id": "CD-2"}))])
    assert first.closed and not first.ok and first.outcome == ABANDONED and first.total_ms == 1000
    assert second.id == "CD-2" and not second.closed


def test_a_fallback_leads_to_what_is_decided_next():
    notes = [*RECOVERY[:6], (400, Note("fallback", "405", {"from": "retry"})), *RECOVERY[7:]]
    (incident,) = told(notes)
    assert [(each.left, each.taken) for each in incident.fallbacks] == [("retry", "recover")]


def test_a_note_outside_any_incident_is_no_incident_and_one_inside_is_a_remark():
    assert told([(0, Note("ignored", "a late report"))]) == ()
    (incident,) = told([*RECOVERY[:3], (50, Note("ignored", "a late report"))])
    assert [remark.text for remark in incident.remarks] == ["a late report"]


def test_faults_are_read_however_they_are_listed():
    rank_fault = RankFault(rank=7, pod=0, pod_uid="p", node="n", code="c", level="L", type="2")
    for given_faults, found in (
        ({4: "0", 5: "1"}, (Fault(4, "0"), Fault(5, "1"))),
        ([{"rank": 4, "type": "0"}], (Fault(4, "0"),)),
        ((rank_fault,), (Fault(7, "2", "c", "L", "n"),)),
        ([4, "x"], (Fault(4), Fault(-1))),
    ):
        (incident,) = told([(0, Note("opened", "", {"faults": given_faults}))])
        assert incident.faults == found


def test_a_fault_that_process_and_node_tell_of_is_listed_once():
    process, node = {"faults": {2: "0", 3: "1"}}, {"rank": 2, "type": "0", "code": "80E01801", "node": "n1"}
    both = (Fault(2, "0", "80E01801", "", "n1", "", "uce"), Fault(3, "1"))
    (incident,) = told([(0, Note("opened", "", process)), (1, Note("fault", "uce", node))])
    assert incident.faults == both
    (incident,) = told([(0, Note("opened", "", {})), (1, Note("fault", "uce", node)), (2, Note("fault", "", process))])
    assert incident.faults == both


def test_an_incident_of_a_huge_job_stays_small():
    notes = [(0, Note("opened", "a node", {"faults": {rank: "1" for rank in range(5000)}}))]
    notes += [(index, Note("phase", f"p{index}")) for index in range(1000)]
    notes += [(1000, Note("fallback", "x" * 5000)) for _ in range(100)]
    notes += [(1000, Note("ignored", "y" * 5000)) for _ in range(100)]
    (incident,) = told(notes)
    assert len(incident.faults) + incident.more_faults == 5000 and len(incident.faults) == bounds.MAX_FAULTS
    assert sum(duration for _, duration in incident.durations) == incident.total_ms == 1000
    assert len(encoded([incident])) < 150_000


def test_what_is_published_is_bounded_by_number_and_size_and_is_the_newest():
    notes = []
    for number in range(60):
        notes += [(number * 10, Note("opened", "c", {"id": f"i{number}"})), (number * 10 + 5, Note("closed", "e"))]
    incidents = told(notes)
    assert [each.id for each in incidents] == [f"i{number}" for number in range(40, 60)]
    large = [replace(each, cause="x" * 60_000) for each in incidents]
    text = encoded(large)
    assert len(text) <= published.MAX_BYTES
    assert [each.id for each in decoded({published.KEY: text})] == ["i56", "i57", "i58", "i59"]


def test_what_an_earlier_job_of_that_name_left_is_not_this_jobs():
    data = config_map(JOB, told(RECOVERY))["data"]
    assert decoded(data, "u-1") and decoded(data, "another") == ()


def test_garbage_in_the_config_map_is_told():
    for data in (None, {}, {published.KEY: "["}, {published.KEY: "[{}]"}, {published.KEY: "[" * 100_000}):
        try:
            decoded(data)
        except Unreadable as error:
            assert str(error)
        else:
            raise AssertionError(data)


def test_of_two_versions_the_further_one_is_right():
    (halfway,), (whole,) = told(RECOVERY[:5]), told(RECOVERY)
    for order in ((halfway, whole), (whole, halfway)):
        kept = History()
        for each in order:
            kept.restore([each])
        assert kept.of(JOB.uid) == (whole,)


def test_one_that_was_left_open_long_ago_does_not_come_back():
    (old,), (whole,) = told(RECOVERY[:5], base=1_600_000_000_000), told(RECOVERY)
    old = replace(old, id="OLD-1")
    kept = History()
    kept.restore([whole])
    (closed,) = kept.restore([old])
    assert closed.id == "OLD-1" and closed.outcome == ABANDONED
    assert kept.of(JOB.uid) == (closed, whole)


def test_the_end_of_a_job_is_the_end_of_its_open_incident():
    kept = History()
    told(RECOVERY[:5], kept=kept)
    ended = kept.forget(JOB.uid, 1_700_000_001_000)
    assert ended is not None and ended.outcome == JOB_GONE and ended.total_ms == 1000
    assert kept.of(JOB.uid) == () and kept.forget(JOB.uid, 0) is None


# Events


def said(notes):
    current: Incident | None = None
    found = []
    for at, note in notes:
        (current,) = fold(current, JOB, note, at)
        found.append(words(note, current))
    return [each for each in found if each is not None]


def test_events_of_a_recovery():
    assert [(each.type, each.reason, each.message) for each in said(RECOVERY)] == [
        ("Warning", "RecoveryStarted", "rank 3 failed"),
        ("Warning", "TrainingFault", "killed"),
        ("Normal", "RecoveryDecided", "recover-in-place: its process is lost, a spare is there"),
        ("Warning", "RecoveryFallback", "recover-in-place -> recover: it did not start (406)"),
        ("Normal", "RecoveryDecided", "recover: the pod is replaced"),
        ("Normal", "RecoverySucceeded", "recovered after 0.7 s: all ranks train"),
    ]
    failed = [*RECOVERY[:-1], (800, Note("closed", "no node is left", {"outcome": "failed"}))]
    assert said(failed)[-1] == Words("Warning", "RecoveryFailed", "failed after 0.8 s: no node is left")
    cancelled = [*RECOVERY[:-1], (800, Note("closed", "it is well again", {"outcome": "cancelled", "ok": True}))]
    assert said(cancelled)[-1] == Words("Normal", "RecoveryCancelled", "cancelled after 0.8 s: it is well again")


def test_the_same_again_is_counted():
    correlator = Correlator()
    first = correlator.tell(JOB, Words("Normal", "R", "m"), 10.0)
    second = correlator.tell(JOB, Words("Normal", "R", "m"), 20.0)
    assert first is not None and second is not None
    assert (second.name, second.count, second.first, second.last) == (first.name, 2, 10.0, 20.0)
    item = event(JOB, second)
    assert item["firstTimestamp"] == "1970-01-01T00:00:10Z" and item["lastTimestamp"] == "1970-01-01T00:00:20Z"
    assert item["involvedObject"]["kind"] == "AscendJob" and item["involvedObject"]["uid"] == "u-1"


def test_many_that_differ_in_their_text_only_become_one():
    correlator = Correlator()
    found = [correlator.tell(JOB, Words("Warning", "TrainingFault", f"rank {rank}"), 1.0) for rank in range(20)]
    names = [each.name for each in found if each is not None]
    assert len(set(names)) == SIMILAR + 1
    assert found[-1] is not None and found[-1].count == 20 - SIMILAR
    assert found[-1].words.message == "(combined from similar events): rank 19"


def test_a_job_that_tells_too_much_is_not_heard_for_a_while_and_the_others_are():
    correlator = Correlator()
    heard = [correlator.tell(JOB, Words("Warning", f"R{number}", ""), 1.0) for number in range(BURST + 5)]
    assert [each is not None for each in heard] == [True] * BURST + [False] * 5
    assert correlator.tell(replace(JOB, uid="u-2"), Words("Warning", "R", ""), 1.0) is not None
    assert correlator.tell(JOB, Words("Warning", "R", ""), 1.0 + REFILL_SECONDS) is not None


def test_what_an_earlier_clusterd_noted_is_told_again():
    """It may have been killed before it had written that down; if not, nothing is there twice."""
    again = [
        (300, Note("opened", "rank 3 failed", {"id": "AB-1", "faults": {3: "1"}, "began": 1_700_000_000.0})),
        (301, Note("decision", "its process is lost, a spare is there", {"strategy": "recover-in-place"})),
    ]
    assert told([*RECOVERY[:6], *again, *RECOVERY[6:]]) == told(RECOVERY)
    (incident,) = told([*again, *RECOVERY[6:]])
    assert incident.cause == "rank 3 failed" and incident.faults == (Fault(3, "1"),)
    assert incident.total_ms == 720 and incident.durations[0] == ("detect", 402)


def test_an_api_server_that_is_away_at_the_start_costs_no_incident_that_was_published():
    kube, refused = FakeKube(), 3

    def away(verb: str, kind: Kind, name: str) -> None:
        nonlocal refused
        if verb == "list" and refused:
            refused -= 1
            raise ApiError(503, "ServiceUnavailable", "away")

    async def incident(name: str) -> None:
        timeline = Timeline(kube)
        await timeline.start()
        for at, note in RECOVERY:
            timeline.note(JOB, Note(note.kind, note.text, {**note.details, "id": name}), at / 1000)
        await timeline.close()

    async def run() -> None:
        kube.before = lambda verb, kind, name: None
        await incident("first")
        kube.before = away
        await incident("second")

    virtual_time.run(run())
    (item,) = kube.items(CONFIG_MAP)
    assert [each["id"] for each in json.loads(item["data"][published.KEY])] == ["first", "second"] and not refused


def test_a_timeline_that_ends_does_not_wait_for_an_api_server_that_is_away():
    async def run() -> None:
        kube = FakeKube()
        timeline = Timeline(kube)

        def away(verb: str, kind: Kind, name: str) -> None:
            timeline.end()
            raise ApiError(503, "ServiceUnavailable", "away")

        kube.before = away
        await timeline.start()
        await timeline.close()

    virtual_time.run(run())
