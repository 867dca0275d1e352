"""What a demo on a cluster compares and proves, and the job that it makes of an example."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evertrain.cli import manifest
from evertrain.cli.demo import clocks, cutting, links, main, manifests, play, processes, proof, recorded
from evertrain.cli.demo.evidence import Evidence, Pod, Verdict
from evertrain.cli.demo.features import FEATURES, Feature
from evertrain.cli.demo.proof import Outcome, Step
from evertrain.cli.demo.screen import Screen
from evertrain.clusterd.timeline.incident import Fallback, Incident, Phase
from evertrain.embedded.cluster import Settings
from evertrain.embedded.network import choice

ROOT = Path(__file__).resolve().parents[3]


def outcome(**changes: Any) -> Outcome:
    """Two ranks, two steps of two samples."""
    results = {rank: {"rank": rank, "step": 2, "weights": "a" * 64, "state": f"{rank}" * 64} for rank in range(2)}
    steps = {rank: [Step(1, (rank,), 4.0), Step(2, (rank + 2,), 3.0)] for rank in range(2)}
    return replace(Outcome(results, steps), **changes)


def test_runs_with_the_same_end_and_samples_are_the_same() -> None:
    same, lines = proof.same_bits(outcome(), outcome())
    assert same and "DIFFERENT" not in "".join(lines)


@pytest.mark.parametrize("key", ["step", "weights", "state"])
def test_another_end_of_one_rank_is_told(key: str) -> None:
    results = outcome().results
    other = {**results, 1: {**results[1], key: "a" * 63 + "b"}}
    same, lines = proof.same_bits(outcome(), outcome(results=other))
    assert not same and [line.split()[0] for line in lines if "DIFFERENT" in line] == ["1"]


def test_a_rank_without_an_end_is_told() -> None:
    same, _ = proof.same_bits(outcome(), outcome(results={0: outcome().results[0]}))
    assert not same


def test_other_samples_are_told() -> None:
    steps = outcome().steps
    swapped = {**steps, 0: [Step(1, (1,), 4.0), steps[0][1]]}
    assert not proof.same_bits(outcome(), outcome(steps=swapped))[0]


def test_a_step_that_was_done_again_counts_once_and_is_counted() -> None:
    steps = outcome().steps
    again = outcome(steps={**steps, 0: [steps[0][0], steps[0][1], steps[0][1]]})
    assert proof.same_bits(outcome(), again)[0]
    assert (outcome().repeated(), again.repeated()) == (0, 1)


def test_fewer_ranks_with_the_same_samples_are_as_good() -> None:
    alone = outcome(steps={0: [Step(1, (0, 1), 4.00001), Step(2, (2,), 3.0)], 1: [Step(2, (3,), 3.0)]})
    assert proof.same_samples(outcome(), alone, 1e-4)[0]
    assert not proof.same_samples(outcome(), alone, 1e-6)[0]


def test_a_sample_that_is_left_out_is_told() -> None:
    lost = outcome(steps={0: [Step(1, (0,), 4.0), Step(2, (2,), 3.0)], 1: [Step(2, (3,), 3.0)]})
    assert not proof.same_samples(outcome(), lost, 1e-4)[0]


@pytest.mark.parametrize("feature", FEATURES.values(), ids=lambda feature: feature.name)
def test_a_job_of_a_demo_is_that_of_the_example(feature: Feature, tmp_path: Path) -> None:
    """But for its name, folders, ports and arguments, and a valid one."""
    file = ROOT / "examples" / "resumable" / feature.example
    *_, original = manifest.read(str(file))
    *others, document = manifests.documents_of(file, "other", tmp_path, ["--steps", "9"], {"NAME": "value"})
    job, maps = document.object, {other.object["metadata"]["name"] for other in others}
    assert maps <= {"reset-config-other"}
    assert job["metadata"].get("annotations") == original.object["metadata"].get("annotations")
    assert job["metadata"]["labels"] == original.object["metadata"]["labels"]
    ports = []
    for replica in job["spec"]["replicaSpecs"].values():
        pod = replica["template"]["spec"]
        paths = [volume["nfs"]["path"] for volume in pod["volumes"] if "nfs" in volume]
        assert paths == [str(file.parents[1]), str(tmp_path)]
        assert {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume} == maps
        (container,) = pod["containers"]
        assert container["args"][-1].endswith(" --steps 9")
        assert {"name": "NAME", "value": "value"} in container["env"]
        ports.append([port["containerPort"] for port in container["ports"]])
        (term,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["labelSelector"]["matchExpressions"][0]["values"] == ["other"]
    assert ports[0] == ports[1] and not {2222, 8000, 9601} & set(ports[0])


def test_the_process_of_a_pod_is_found_only_below_this_one() -> None:
    environment = {**os.environ, "HOSTNAME": "pod-0"}
    with subprocess.Popen(["sleep", "60"], env=environment) as child:
        try:
            assert processes.find("pod-0", child.pid) == child.pid
            assert processes.find("pod-1", child.pid) is None
        finally:
            child.kill()
    assert processes.find(os.environ.get("HOSTNAME", ""), os.getpid()) is None


def test_connections_are_counted_by_the_link_that_they_begin_on() -> None:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.102.0.9", 0))
        server.listen()
        client.bind(("127.101.0.9", 0))
        client.connect(server.getsockname())
        counted = {name: links.connections(network, [os.getpid()]) for name, network in links.NETWORKS.items()}
        assert counted == {"primary": 1, "backup": 0}, "the other end has not been accepted"


def test_a_row_that_is_lost_or_double_in_a_table_that_changes_is_no_miscount(monkeypatch: pytest.MonkeyPatch) -> None:
    (local,) = struct.unpack("=I", socket.inet_aton("127.101.0.9"))
    with socket.socket() as own:
        row = f" 0: {local:08X}:1F90 {local:08X}:1F91 01 0 0 0 0 0 {os.fstat(own.fileno()).st_ino}"
        tables = iter(["head", f"head\n{row}\n{row}", f"head\n{row}"])
        monkeypatch.setattr(links, "_TABLE", SimpleNamespace(read_text=lambda: next(tables)))
        assert links.connections(links.NETWORKS["primary"], [os.getpid()]) == 1


def test_an_unknown_feature_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nothing"])
    assert ended.value.code == 2
    assert "process-rescheduling" in capsys.readouterr().err


# --- what is proved


MASTER, WORKER = Pod("job-master-0", "1", "node-0"), Pod("job-worker-0", "2", "node-1")
MOVED = Pod("job-worker-0", "3", "node-2")


def incident(decision: str = "recover", *, ok: bool = True, fallbacks: tuple[str, ...] = ()) -> Incident:
    return Incident(
        "id", "uid", "job", "default", 1000, 1500, cause="rank 3 failed", decision=decision, reason="so", ok=ok,
        phases=(Phase("detect", 1000), Phase("stop", 1100)), closed=True, outcome="recovered", end="good",
        fallbacks=tuple(Fallback(1200, left, "", "no use") for left in fallbacks),
    )  # fmt: skip


def evidence(**changes: Any) -> Evidence:
    processes = {0: 1, 1: 1, 2: 2, 3: 2}
    good = Evidence([incident()], [MASTER, WORKER], [MASTER, MOVED], processes, 0, [], [], [900, 1020, 1600], 990)
    return replace(good, **changes)


@pytest.mark.parametrize(
    ("judged", "good"),
    [
        (evidence().decided("recover"), True),
        (evidence().decided("retry"), False),
        (evidence(incidents=[incident(ok=False)]).decided("recover"), False),
        (evidence(incidents=[]).decided("recover"), False),
        (evidence().decided("recover", times=2), False),
        (evidence(incidents=[incident(), incident()]).decided("recover", times=2), True),
        (evidence().moved("worker"), True),
        (evidence(pods=[MASTER, WORKER]).moved("worker"), False),
        (evidence(pods=[replace(MASTER, uid="9"), MOVED]).moved("worker"), False),
        (evidence().replaced_all("worker"), False),
        (evidence(pods=[replace(MASTER, uid="9"), MOVED]).replaced_all("worker"), True),
        (evidence(pods=[replace(MASTER, uid="9"), replace(MOVED, node="node-1")]).replaced_all("worker"), False),
        (evidence(pods=[MOVED]).replaced_all("worker"), False),
        (evidence().kept_pods(), False),
        (evidence(pods=[WORKER, MASTER]).kept_pods(), True),
        (evidence().restarted(2, 3), True),
        (evidence().restarted(3), False),
        (evidence().restarted(), False),
        (evidence().timed(), True),
        (evidence(incidents=[replace(incident(), closed=False)]).timed(), False),
        (evidence(incidents=[replace(incident(), updated_ms=1000)]).timed(), False),
        (evidence(incidents=[]).timed(), False),
        (evidence(incidents=[incident(), incident()]).timed(), True),
        (evidence(repeated=1).did_again(0), False),
        (evidence(repeated=1).did_again(1), True),
        (evidence().saved_one_checkpoint(), False),
        (evidence(links=["backup", "primary"]).used_links("backup", "primary"), True),
        (evidence(links=["backup", "backup"]).used_links("backup", "primary"), False),
        (evidence(incidents=[incident("dump", fallbacks=("retry",))]).fell_back("retry", "dump"), True),
        (evidence(incidents=[incident("dump")]).fell_back("retry", "dump"), False),
        (evidence().obeyed(1), True),
        (evidence().obeyed(2), False),
        (evidence(incidents=[incident(), incident(ok=False)]).obeyed(2), False),
        (evidence().halted_in("stop"), True),
        (evidence().halted_in("migrate"), False),
    ],
)
def test_what_is_promised_is_true_or_not(judged: Verdict, good: bool) -> None:
    assert judged[1] == good, judged


SOON, LATE = 1500 + clocks.MARGIN_MS, 1500 + clocks.MARGIN_MS + 1
"""After the end of the incident."""
OVERSTATED = replace(incident(), updated_ms=1500 + LATE)
SWITCHED = replace(incident("hotSwitch"), updated_ms=9000)
RESTARTED = replace(incident("dump"), outcome="fell back")


@pytest.mark.parametrize(
    ("told", "happened_ms", "done", "after", "good"),
    [
        (incident(), None, [900, 1600, 1700], 1600, True),
        (incident(), 950, [900, 1000, 1600], 1600, True),  # a step that was under way
        (incident(), None, [900, 1490, 1640], 1490, True),  # ClusterD heard a little later that they are through
        (incident(), None, [900, SOON], SOON, True),
        (incident(), None, [900, LATE], LATE, False),
        (incident(), None, [900], None, False),
        (OVERSTATED, None, [900, 1500, *range(1600, 9000, 100)], 1500, False),
        (RESTARTED, None, [900, LATE], LATE, True),  # processes that all start again take their time
        (replace(RESTARTED, updated_ms=OVERSTATED.updated_ms), None, [900, 1500, 1600], 1500, False),
        (SWITCHED, None, [*range(900, 8500, 100), 9100], 9100, True),
        (SWITCHED, None, [*range(900, 8500, 100), 9000 + LATE], 9000 + LATE, False),
    ],
)
def test_training_goes_on_when_an_incident_is_over_by_the_clock_of_its_steps(
    told: Incident, happened_ms: int | None, done: list[int], after: int | None, good: bool
) -> None:
    assert clocks.next_step(told, happened_ms, done) == after
    assert clocks.agree(told, after) is good


def test_both_clocks_are_shown() -> None:
    text, good = evidence(done=[900, 1750]).timed()
    assert good
    assert text == "the phases add up to 510 ms; by the training's own clock its next step was done after 760 ms"


def test_the_phases_of_an_incident_add_up_from_the_moment_of_the_fault() -> None:
    shown = [line for line, _ in recorded.lines(incident(fallbacks=("retry",)), happened_ms=990)]
    took = [int(line.split(" ms ")[0].split()[-1]) for line in shown if " ms " in line]
    assert took == [10, 100, 400, 510]
    assert any(line.startswith("fallback") and "retry: no use" in line for line in shown)


# --- the cluster


async def test_it_is_said_why_pods_share_the_network_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class NotAllowed:
        def __init__(self, settings: Settings) -> None:
            self.shared = None if settings.own_network is False else choice.not_allowed("the kernel says no")

        async def __aenter__(self) -> NotAllowed:
            return self

        async def __aexit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(play, "Cluster", NotAllowed)
    for wanted, told in ((None, True), (False, False)):
        async with play._cluster(FEATURES["link-failover"], tmp_path, Screen(), wanted):
            assert ("Pods share the network of this machine (the kernel says no)" in capsys.readouterr().out) is told


# --- what a demo does to the network


def test_the_connections_between_two_processes_are_cut_and_no_others() -> None:
    program = (
        "import socket, sys; port = int(sys.argv[1]); one, two = (socket.create_connection(('127.0.0.1', port))"
        " for _ in range(2)); print('connected', flush=True); print(one.recv(1) + two.recv(1), flush=True); input()"
    )
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        far, other = (
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", program, str(server.getsockname()[1])],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                )  # fmt: skip
            )
            for _ in range(2)
        )
        here = [stack.enter_context(server.accept()[0]) for _ in range(4)]
        for process in (far, other):
            assert process.stdout is not None and process.stdout.readline() == "connected\n"
        assert cutting.cut([os.getpid()], [far.pid]) == 2
        assert far.communicate("\n")[0] == "b''\n", "both have ended"
        assert other.poll() is None
        assert cutting.cut([os.getpid()], [other.pid]) == 2
        assert other.communicate("\n")[0] == "b''\n"
        assert [each.recv(1) for each in here] == [b""] * 4


@pytest.mark.parametrize("count", [0, 2])
def test_only_what_was_cut_from_here_has_a_moment(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it may not, the training script has a fault of its own, of which nobody here knows the moment."""
    demo = play.Play(FEATURES["online-recovery"], SimpleNamespace(), tmp_path, Screen(), 60, 1.0)  # type: ignore[arg-type]
    demo._job = SimpleNamespace(process_outside=lambda rank: rank)  # type: ignore[assignment]
    monkeypatch.setattr(cutting, "cut", lambda some, others: count)
    assert demo.cut((0, 1), (2, 3)) == count
    assert (demo._happened_ms is not None) is bool(count)
    assert ("connections can't be cut here" in capsys.readouterr().out) is (count == 0)
