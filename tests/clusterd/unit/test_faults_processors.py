"""Each processor of the fault centre with its windows, on virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evertrain.clusterd.faults.custom import read_filter
from evertrain.clusterd.faults.wellknown import SWITCH_LINK_DOWN
from tests.clusterd.faultworld import START, S, World, chip, device_data, link_down, make_job, switch_info

UCE, HCCL, AIC = "80E01801", "8C1F860B", "80C98009"
MEMORY, NETWORK, OTHER = "0", "2", "1"


def uce(number: int = 0, came: int = START):
    return chip(number, UCE, "RestartBusiness", came)


def hccl(number: int = 0, came: int = START):
    return chip(number, HCCL, "NotHandleFault", came)


# Retries.


@pytest.mark.parametrize("strategy", ["", "recover", "dump,exit"])
def test_a_job_that_cannot_retry_has_the_fault_at_once(strategy: str) -> None:
    world = World(make_job(strategy=strategy))
    world.chips("n0", uce())
    assert world.hit() == [(0, UCE, "RestartBusiness", OTHER)]
    assert world.codes("n0") == [(UCE, "RestartBusiness")]


@pytest.mark.parametrize("strategy", ["retry", "recover, retry ,dump"])
def test_a_memory_error_is_withheld_until_the_job_reports_it_or_does_not(strategy: str) -> None:
    world = World(make_job(strategy=strategy))
    result = world.chips("n0", uce())
    assert world.codes("n0") == [] and result.devices["n0"].unhealthy == ()
    assert "Ascend910-0" not in result.devices["n0"].available, "only the node says what is available"
    assert world.ranks() == []
    assert result.next_ms == START + 10 * S
    world.at(10 * S - 1)
    assert world.codes("n0") == []
    world.at(10 * S)
    assert world.codes("n0") == [(UCE, "RestartBusiness")]
    assert world.result.devices["n0"].unhealthy == ("Ascend910-0",)
    assert world.hit() == [(0, UCE, "RestartBusiness", OTHER)]


def test_a_memory_error_that_the_job_reports_in_time_may_be_retried() -> None:
    world = World(make_job(strategy="retry"))
    world.chips("n0", uce())
    world.at(9 * S)
    world.report({0: MEMORY})
    assert world.hit() == [(0, UCE, "RestartBusiness", MEMORY)] and world.health() == "UnHealthy"
    assert world.codes("n0") == [], "schedulers keep their hands off"
    world.at(39 * S - 1)
    assert world.codes("n0") == []
    world.at(39 * S)
    assert world.codes("n0") == [(UCE, "RestartBusiness")], "it took too long"
    world.at(69 * S - 1)
    assert world.hit() == [(0, UCE, "RestartBusiness", MEMORY)]
    world.at(69 * S)
    assert world.hit() == [(0, UCE, "RestartBusiness", OTHER)], "the report is forgotten after a minute"


@pytest.mark.parametrize("seen", [True, False])
def test_a_memory_error_that_is_not_cured_by_a_retry_may_be_cured_by_a_new_process(seen: bool) -> None:
    """Whether or not its chip has seen it, too."""
    for strategy, in_place in (("retry", False), ("retry,recover-in-place", True)):
        world = World(make_job(strategy=strategy))
        world.chips("n0", *([uce()] if seen else []))
        world.report({0: MEMORY})
        assert [(each.type, each.in_place) for each in world.ranks()] == [(MEMORY, in_place)]


def test_a_report_that_comes_too_late_is_for_a_moment_only() -> None:
    world = World(make_job(strategy="retry"))
    world.chips("n0", uce())
    world.at(11 * S)
    world.report({0: MEMORY})
    assert world.codes("n0") == [(UCE, "RestartBusiness")]
    assert world.hit() == [(0, UCE, "RestartBusiness", MEMORY)]
    world.at(21 * S)
    assert world.hit() == [(0, UCE, "RestartBusiness", OTHER)]


def test_a_retry_that_succeeds_leaves_nothing() -> None:
    world = World(make_job(strategy="retry"))
    world.chips("n0", uce())
    world.at(2 * S)
    world.report({0: MEMORY})
    world.at(5 * S)
    world.chips("n0")
    assert world.hit() == [(0, UCE, "RestartBusiness", MEMORY)], "the report alone, for 10 s"
    world.at(12 * S)
    assert world.result.jobs == {}
    world.at(1000 * S)
    assert world.result.jobs == {} and world.result.next_ms is None


@pytest.mark.parametrize(("type_", "code"), [(MEMORY, UCE), (NETWORK, HCCL)])
def test_what_only_the_process_has_seen(type_: str, code: str) -> None:
    world = World(make_job(strategy="retry"))
    world.report({3: type_})
    [fault] = world.ranks()
    assert (fault.rank, fault.code, fault.level, fault.type) == (3, code, "RestartBusiness", type_)
    assert (fault.node, fault.device, fault.time_ms, fault.reported) == ("n1", "1", START, True)
    assert world.told() == []
    world.at(10 * S - 1)
    assert world.ranks()
    world.at(10 * S)
    assert world.ranks() == []


def test_reports_of_other_kinds_jobs_and_ranks_are_nothing_to_the_centre() -> None:
    world = World(make_job(strategy="retry"), make_job("other", nodes=("n2",)))
    world.report({0: OTHER, 99: MEMORY, -5: MEMORY})
    world.report({0: MEMORY}, job="nobody")
    world.report({0: MEMORY}, job="other")
    assert world.result.jobs == {}


def test_the_report_of_another_rank_does_not_count() -> None:
    world = World(make_job(strategy="retry"))
    world.chips("n0", uce())
    world.report({1: MEMORY})
    world.at(10 * S)
    assert (0, UCE, "RestartBusiness", OTHER) in world.hit()


def test_reports_survive_a_restart() -> None:
    world = World(make_job(strategy="retry"))
    world.chips("n0", uce())
    world.report({0: MEMORY})
    world.at(20 * S)
    world.restart()
    assert world.codes("n0") == [] and world.hit() == [(0, UCE, "RestartBusiness", MEMORY)]
    world.at(30 * S)
    assert world.codes("n0") == [(UCE, "RestartBusiness")]
    world.at(60 * S)
    assert world.hit() == [(0, UCE, "RestartBusiness", OTHER)]


# What accompanies a memory error.


def test_what_accompanies_a_memory_error_is_no_fault() -> None:
    world = World(make_job(strategy="retry"))
    world.chips("n0", chip(0, AIC, "RestartRequest"))
    assert world.codes("n0") == [] and world.ranks() == [] and world.told() == []
    world.at(4 * S)
    world.chips("n0", chip(0, AIC, "RestartRequest"), uce(came=START + 4 * S))
    world.at(20 * S)
    assert world.codes("n0") == [(UCE, "RestartBusiness")]
    world.chips("n0", chip(0, AIC, "RestartRequest"))
    assert world.codes("n0") == [], "also when the memory error is gone"


@pytest.mark.parametrize("reports", [True, False])
def test_what_may_accompany_one_is_a_fault_after_five_seconds(reports: bool) -> None:
    world = World(make_job(strategy="retry"))
    world.chips("n0", chip(0, AIC, "RestartRequest"), uce(1, START))
    world.at(3 * S)
    if reports:
        world.report({0: MEMORY})
    world.at(5 * S - 1)
    assert (AIC, "RestartRequest") not in world.codes("n0")
    world.at(5 * S)
    assert ((AIC, "RestartRequest") in world.codes("n0")) == (not reports), "the error of another chip doesn't count"
    assert ((0, AIC, "RestartRequest", OTHER) in world.hit()) == (not reports)


# A failed retry of communication.


def test_a_failed_retry_that_the_job_never_reports_is_shown_again() -> None:
    world = World(make_job(strategy="retry"))
    world.chips("n0", hccl())
    assert world.codes("n0") == []
    world.at(3 * S)
    world.chips("n0")
    world.at(60 * S - 1)
    assert world.codes("n0") == [] and world.ranks() == []
    world.at(60 * S)
    assert world.codes("n0") == [(HCCL, "RestartBusiness")], "the job hangs"
    assert world.result.devices["n0"].unhealthy == ("Ascend910-0",)
    assert world.hit() == [(0, HCCL, "RestartBusiness", OTHER)]
    world.job(make_job(strategy="retry", generation="b"))
    world.look()
    assert world.codes("n0") == [], "the pod was replaced"
    world.at(1000 * S)
    assert world.result.jobs == {} and world.result.next_ms is None


def test_a_failed_retry_is_not_shown_again_for_good() -> None:
    world = World(make_job(strategy="retry"))
    world.chips("n0", hccl())
    world.chips("n0")
    world.at(100 * S)
    assert world.codes("n0") == [(HCCL, "RestartBusiness")]
    world.at(120 * S)
    assert world.codes("n0") == [] and world.result.next_ms is None


def test_a_failed_retry_that_is_still_listed_is_shown_when_its_time_is_over() -> None:
    world = World(make_job(strategy="retry"))
    world.chips("n0", hccl())
    world.at(10 * S)
    assert world.codes("n0") == [(HCCL, "RestartBusiness")]


@pytest.mark.parametrize("when", [5, 30, 70])
def test_a_job_that_reports_one_lives(when: int) -> None:
    world = World(make_job(strategy="retry"))
    world.chips("n0", hccl())
    world.chips("n0")
    world.at(when * S)
    world.report({2: NETWORK})
    assert world.codes("n0") == []
    world.at(when * S + 11 * S)
    assert world.result.jobs == {}
    world.at(1000 * S)
    assert world.result.jobs == {}


def test_a_job_that_has_reported_it_before_its_chip_lives_too() -> None:
    world = World(make_job(strategy="retry"))
    world.report({0: NETWORK})
    world.at(2 * S)
    world.chips("n0", hccl(came=START + S))
    world.chips("n0")
    world.at(61 * S)
    assert world.codes("n0") == [] and world.result.next_ms is None


def test_a_report_is_forgotten_with_its_pod() -> None:
    world = World(make_job(strategy="retry"))
    world.report({0: MEMORY, 3: MEMORY})
    other = make_job(strategy="retry", generation="b")
    world.job(replace(other, pods={**other.pods, 0: make_job().pods[0]}))
    world.look()
    assert [fault.rank for fault in world.ranks()] == [0]


def test_a_failed_retry_that_is_remembered_survives_a_restart() -> None:
    world = World(make_job(strategy="retry"))
    world.chips("n0", hccl())
    world.chips("n0")
    world.at(30 * S)
    world.restart()
    world.at(60 * S)
    assert world.codes("n0") == [(HCCL, "RestartBusiness")]


# Related faults.


def test_a_link_that_is_down_and_a_failed_retry_separate_the_pod_with_the_link() -> None:
    world = World(make_job(strategy="retry"))
    world.chips("n1", link_down(0))
    assert world.ranks() == []
    world.chips("n0", hccl())
    world.chips("n0")
    world.at(60 * S)
    assert world.codes("n0") == [(HCCL, "NotHandleFault")], "not the chip that only noticed"
    assert world.hit() == [(2, "81078603", "SeparateFault", OTHER)]
    assert world.health() == "UnHealthy"
    assert world.result.labels == {"job-uid-1-pod-1-a": "Separate"}
    world.chips("n1")
    world.at(200 * S)
    assert world.result.labels == {"job-uid-1-pod-1-a": "Separate"}, "it stays with the pod"
    world.restart()
    assert world.result.labels == {"job-uid-1-pod-1-a": "Separate"}
    world.job(make_job(strategy="retry", generation="b"))
    assert world.look().labels == {} and world.ranks() == []


@pytest.mark.parametrize(("later", "matches"), [(9, True), (11, False)])
def test_the_order_in_which_nodes_are_heard_does_not_matter(later: int, matches: bool) -> None:
    world = World(make_job())
    world.chips("n0", chip(0, "8C1F8608", "NotHandleFault"))
    world.chips("n0")
    world.at(later * S)
    world.chips("n1", link_down(1, START - S))
    assert world.result.labels == ({"job-uid-1-pod-1-a": "Separate"} if matches else {})


def test_a_trigger_without_a_link_that_is_down_is_nothing() -> None:
    world = World(make_job(), make_job("other", nodes=("n2",)))
    world.chips("n2", link_down(0))
    world.chips("n0", hccl())
    world.at(299 * S)
    assert world.result.labels == {}, "the link is another job's"


def test_a_switch_link_that_is_down_and_a_failed_retry_separate_all_pods_of_the_node() -> None:
    world = World(make_job())
    world.chips("n1", switch=switch_info("[0x08520003,na,L2,na]", "NotHandle", "Healthy"))
    world.chips("n0", hccl())
    assert world.hit() == [(rank, "[0x08520003,na,L2,na]", "SeparateFault", OTHER) for rank in (2, 3)]
    assert world.result.labels == {"job-uid-1-pod-1-a": "Separate"}


def test_the_lighter_trigger_makes_a_link_sub_healthy_while_it_is_down() -> None:
    world = World(make_job())
    world.chips("n1", link_down(0))
    world.chips("n0", chip(0, "8C1F8609", "NotHandleFault"))
    assert world.result.labels == {"job-uid-1-pod-1-a": "SubHealth"}
    assert world.hit() == [(2, "81078603", "SubHealthFault", OTHER)] and world.health() == "SubHealthy"
    world.chips("n1")
    assert world.result.labels == {} and world.result.jobs["job-uid-1"].ranks == ()


def test_faults_without_a_trigger() -> None:
    world = World(make_job())
    world.chips("n0", link_down(0))
    world.chips("n1", switch=switch_info("[0x08520003,na,L2,na]", "NotHandle", "Healthy"))
    world.at(300 * S - 1)
    assert world.result.labels == {}
    world.at(300 * S)
    assert world.result.labels == {"job-uid-1-pod-1-a": "SubHealth"}, "the switch; the chip is ignored"
    world.chips("n1")
    assert world.look().labels == {}


@pytest.mark.parametrize("super_pod", [-2, 5])
def test_a_link_in_a_super_pod_and_a_communication_error_of_its_time(super_pod: int) -> None:
    world = World(make_job())
    world.centre.relation_rules('[{"TriggerFault":"X","RelationFaults":["Y"],"FaultStrategy":"Separate"}]', "")
    world.centre.relation_rules(
        '[{"TriggerFault":"8C1F8608","RelationFaults":["Y","81078603"],"FaultStrategy":"Separate"}]', ""
    )
    world.chips("n1", link_down(0), super_pod=super_pod)
    world.at(100 * S)
    world.chips("n0", chip(0, "8C1F8608", "NotHandleFault", START + 100 * S))
    world.at(101 * S)
    world.chips("n0")
    assert world.result.labels == {}
    world.at(300 * S)
    assert world.result.labels == ({"job-uid-1-pod-1-a": "Separate"} if super_pod >= 0 else {})


def test_a_fault_from_before_the_job_is_ignored_when_its_time_is_over() -> None:
    world = World(make_job(created=START // 1000 + 1))
    world.chips("n1", switch=switch_info("[0x08520003,na,L2,na]", "NotHandle", "Healthy"))
    world.at(300 * S)
    assert world.result.labels == {}


def test_rules_of_related_faults_that_cannot_be_used() -> None:
    world = World(make_job())
    for relations, durations in (("{", ""), ("[{}]", "[]x"), ('[{"TriggerFault":"a"}]', '[{"FaultCode":"a"}]')):
        world.centre.relation_rules(relations, durations)
        assert world.look().complaints
    world.centre.relation_rules("", '[{"FaultCode":"81078603","FaultType":"chip","TimeOutInterval":5}]')
    world.chips("n1", link_down(0))
    world.at(6 * S)
    world.chips("n0", hccl(came=START + 6 * S))
    assert world.result.labels == {}, "its time was over"


# Restarts in place.


@pytest.mark.parametrize("level", ["RestartRequest", "RestartBusiness"])
def test_a_fault_that_a_restart_in_place_may_cure(level: str) -> None:
    world = World(make_job(strategy="recover-in-place"))
    result = world.chips("n1", chip(0, "ABCD0001", level))
    assert world.codes("n1") == [] and result.devices["n1"].unhealthy == ()
    [fault] = world.ranks()
    assert fault.in_place and fault.level == level and fault.type == OTHER
    assert world.told() == [("n1", "0", "NPU", "ABCD0001")]
    world.at(60 * S - 1)
    assert world.codes("n1") == []
    world.at(60 * S)
    assert world.codes("n1") == [("ABCD0001", level)] and not world.ranks()[0].in_place


def test_a_worse_fault_of_the_same_pod_or_of_the_first_pod_needs_more_than_that() -> None:
    world = World(make_job(strategy="recover-in-place"))
    curable = chip(0, "ABCD0001", "RestartRequest")
    world.chips("n1", curable, chip(1, "ABCD0002", "RestartNPU"))
    assert len(world.codes("n1")) == 2
    world.chips("n1", curable)
    assert world.codes("n1") == []
    world.chips("n0", chip(1, "ABCD0002", "SeparateNPU"))
    assert world.codes("n1") == [("ABCD0001", "RestartRequest")], "the first pod leads all others"
    world.chips("n0", chip(1, "ABCD0002", "RestartBusiness"))
    assert world.codes("n1") == [] and world.codes("n0") == []
    world.chips("n0", chip(3, "ABCD0002", "SeparateNPU"))
    assert world.codes("n1") == [], "not a chip of the job"


@pytest.mark.parametrize(("strategy", "hidden"), [("ignore", True), ("nonsense", True), ("hotSwitch", False)])
def test_sub_health_besides(strategy: str, hidden: bool) -> None:
    world = World(make_job(strategy="recover-in-place", labels={"subHealthyStrategy": strategy}))
    world.chips("n1", chip(0, "ABCD0001", "RestartRequest"), chip(0, "ABCD0002", "SubHealthFault"))
    assert (len(world.codes("n1")) == 1) == hidden


def test_a_job_that_gives_up_restarting_in_place_shows_its_faults() -> None:
    world = World(make_job(strategy="recover-in-place"))
    world.chips("n1", chip(0, "ABCD0001", "RestartRequest"))
    world.centre.expose(["job-uid-1-pod-1-a"])
    world.look()
    assert world.codes("n1") == [("ABCD0001", "RestartRequest")]
    world.restart()
    assert world.codes("n1") == [("ABCD0001", "RestartRequest")]
    world.job(make_job(strategy="recover-in-place", generation="b"))
    world.look()
    assert world.codes("n1") == [], "another pod"


# Stress tests.


def test_what_a_stress_test_brings_about_is_no_fault() -> None:
    world = World(make_job())
    world.chips("n0", chip(0, "80818C05", "SubHealthFault"), chip(1, "80818C06", "SubHealthFault"))
    assert len(world.codes("n0")) == 2
    world.centre.stress_testing("job-uid-1", ["n0"])
    world.look()
    assert world.codes("n0") == [] and world.ranks() == [] and world.told() == []
    world.chips("n1", chip(0, "80818C05", "SubHealthFault"))
    assert len(world.codes("n1")) == 1, "not under test"
    world.centre.stress_testing("job-uid-1", [])
    world.look()
    assert len(world.codes("n0")) == 2


# A job's own filter.


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("80E01801", {"80E01801": 60}),
        ("80e01801:5,ABC : 7", {"80E01801": 5, "ABC": 7}),
        ("80E01801\uff1a5\uff0cABC", {"80E01801": 5, "ABC": 60}),
        ("[0x08520003,na,L2,na]:9,X", {"[0X08520003,NA,L2,NA]": 9, "X": 60}),
        ("X:0", {"X": 0}),
        ("X:86400,Y:86401,Z:-1,W:soon", {"X": 86400, "Y": 60, "Z": 60, "W": 60}),
        (",,:5,", {"5": 60}),
        ("", {}),
    ],
)
def test_filters(text: str, found: dict[str, int]) -> None:
    filter = read_filter({"huawei.com/schedule.filter.faultCode": text})
    assert {code: ms // 1000 for code, ms in filter.codes.items()} == found


@pytest.mark.parametrize("by", ["Code", "Level"])
def test_a_fault_that_the_job_wants_to_see_older(by: str) -> None:
    key = {"Code": "ABCD0001", "Level": "RestartNPU"}[by]
    world = World(make_job(annotations={f"huawei.com/schedule.filter.fault{by}": f"{key}:30"}))
    result = world.chips("n0", chip(0, "ABCD0001", "RestartNPU"), chip(1, "ABCD0002", "SeparateNPU"))
    assert world.codes("n0") == [("ABCD0002", "SeparateNPU")]
    assert result.devices["n0"].unhealthy == ("Ascend910-1",)
    assert [fault.rank for fault in world.ranks()] == [1]
    assert ("n0", "0", "NPU", "ABCD0001") in world.told(), "subscribers hear of it at once"
    world.at(30 * S)
    assert len(world.codes("n0")) == 2 and world.result.devices["n0"].unhealthy == ("Ascend910-0", "Ascend910-1")
    world.chips("n2", chip(0, "ABCD0001", "RestartNPU", START + 30 * S))
    assert len(world.codes("n2")) == 1, "not a node of the job"


def test_a_server_whose_controller_hears_of_faults_has_time_to_mend_them_itself() -> None:
    """Those that a new request mends, of that service; what the job itself has asked for counts more."""
    labels = {"jobID": "chat", "app": "mindie-ms-server"}
    asked = {"huawei.com/schedule.filter.faultLevel": "RestartRequest:5"}
    world = World(
        make_job("served", ("n0",), labels=labels),
        make_job("impatient", ("n1",), labels=labels, annotations=asked),
        make_job("other", ("n2",), labels={"jobID": "translate", "app": "mindie-ms-server"}),
    )
    faults = (chip(0, "ABCD0001", "RestartRequest"), chip(1, "ABCD0002", "RestartBusiness"))
    for node in ("n0", "n1", "n2"):
        world.chips(node, *faults)
    everything, severe = (
        [("ABCD0001", "RestartRequest"), ("ABCD0002", "RestartBusiness")],
        [("ABCD0002", "RestartBusiness")],
    )
    assert [world.codes(node) for node in ("n0", "n1", "n2")] == [everything, severe, everything]
    world.centre.heard({"chat"})
    world.look()
    assert [world.codes(node) for node in ("n0", "n1", "n2")] == [severe, severe, everything]
    assert ("n0", "0", "NPU", "ABCD0001") in world.told("served"), "who hears of faults hears of it at once"
    world.at(5 * S)
    assert [world.codes(node) for node in ("n0", "n1")] == [severe, everything]
    world.at(60 * S)
    assert world.codes("n0") == everything
    world.chips("n0", chip(0, "ABCD0003", "RestartRequest", world.now))
    assert world.codes("n0") == []
    world.centre.heard(())
    world.look()
    assert world.codes("n0") == [("ABCD0003", "RestartRequest")], "nobody hears of it any more"


def test_a_fault_of_a_switch_that_the_job_wants_to_see_older() -> None:
    code = "[0x00f103b0,155907,na,na]"
    world = World(make_job(annotations={"huawei.com/schedule.filter.faultCode": f"{code}:30"}))
    result = world.chips("n0", switch=switch_info(code, "Separate", "UnHealthy"))
    assert result.switches["n0"].status == "Healthy" and result.switches["n0"].faults == ()
    assert world.ranks() == [] and world.told() == [("n0", "-1", "Switch", code)]
    assert result.isolated == {}
    world.at(30 * S)
    assert world.result.switches["n0"].status == "UnHealthy" and len(world.ranks()) == 2


def test_a_clock_that_is_set_back_hides_nothing_for_good() -> None:
    world = World(make_job(strategy="retry"))
    world.now = START + 5000 * S
    world.chips("n0", uce(came=START + 5000 * S))
    world.now = START
    result = world.look()
    assert result.next_ms is not None
    world.chips("n0")
    world.centre.device("n0", device_data(uce(came=START + 5000 * S)))
    world.look()
    world.at(10 * S)
    assert world.codes("n0") == [(UCE, "RestartBusiness")]


@pytest.mark.parametrize("by", [-5000 * S, 5000 * S])
def test_what_waits_for_its_time_waits_as_long_when_the_clock_is_set(by: int) -> None:
    """Nobody publishes a fault again because a clock was set."""
    annotations = {"huawei.com/schedule.filter.faultCode": "80E18402:20"}
    world = World(
        make_job("retries", ("n0",), strategy="retry"), make_job("young", ("n1",), annotations=annotations),
        make_job("placed", ("n2",), strategy="recover-in-place"),
    )  # fmt: skip
    world.chips("n0", uce(), hccl(1))
    world.chips("n1", chip(0, "80E18402", "SeparateNPU"))
    world.chips("n2", chip(0, "81078603", "RestartBusiness"))
    world.at(4 * S)
    world.set_clock(by)
    assert [world.codes(node) for node in ("n0", "n1", "n2")] == [[], [], []]
    world.at(by + 10 * S - 1)
    assert world.codes("n0") == []
    world.at(by + 10 * S)
    assert [code for code, _ in world.codes("n0")] == [UCE, HCCL]
    world.at(by + 20 * S - 1)
    assert world.codes("n1") == []
    world.at(by + 20 * S)
    assert len(world.codes("n1")) == 1
    world.at(by + 60 * S - 1)
    assert world.codes("n2") == []
    world.at(by + 60 * S)
    assert len(world.codes("n2")) == 1


@pytest.mark.parametrize("by", [-5000 * S, 5000 * S])
def test_a_report_and_related_faults_are_as_old_as_they_were_when_the_clock_is_set(by: int) -> None:
    world = World(make_job("retries", ("n0",), strategy="retry"), make_job("linked", ("n2",)))
    world.chips("n0", uce())
    world.chips("n2", link_down(0))
    world.at(9 * S)
    world.report({0: MEMORY}, "retries")
    world.set_clock(by)
    world.at(by + 39 * S - 1)
    assert world.codes("n0") == []
    world.at(by + 39 * S)
    assert len(world.codes("n0")) == 1
    world.at(by + 200 * S)
    assert world.centre._pipeline.reports.by_job == {}
    world.chips("n2", link_down(0), chip(0, "8C1F8609", "NotHandleFault", world.now))
    assert set(world.result.labels.values()) == {"SubHealth"}, "the link that went down is not forgotten"
    world.restart()
    assert world.centre._pipeline.relations.jobs["linked"].pending == {}, "nor told twice"


@pytest.mark.parametrize("by", [-5000 * S, 5000 * S])
def test_a_link_of_a_switch_is_judged_when_its_time_is_over_by_whatever_clock(by: int) -> None:
    world = World(make_job(nodes=("n0",)))
    world.chips("n0", switch=switch_info(SWITCH_LINK_DOWN, "NotHandle", "Healthy"))
    world.at(4 * S)
    world.set_clock(by)
    world.at(by + 300 * S - 1)
    assert world.result.labels == {}
    world.at(by + 300 * S)
    assert set(world.result.labels.values()) == {"SubHealth"}
