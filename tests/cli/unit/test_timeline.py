"""`evertrain timeline`, and the sentence that the launcher prints for an incident."""

import json

import pytest

from evertrain.cli import incidents, timeline
from evertrain.cli.main import main
from evertrain.clusterd.timeline.incident import Incident, Phase
from evertrain.launch.report import fault_sentence, incident_line

KILLED = {
    "event": "incident",
    "id": "i-0001",
    "opened": "2026-01-02T03:04:05.678Z",
    "faults": [
        {"kind": "exit", "rank": 1, "incarnation": 0, "detail": "killed by SIGKILL", "exit_code": -9, "step": 12},
        {"kind": "link", "rank": 0, "incarnation": 0, "detail": "peer gone", "step": 12},
    ],
    "decision": "recover-in-place",
    "reason": "rank 1 is replaced: its process is lost",
    "phases_ms": {"detect": 2.1, "decide": 0.1, "stop": 8, "rebuild": 14, "repair": 21, "resume": 40},
    "total_ms": 85.2,
    "step": 12,
    "steps_lost": 0,
    "restarted": [1],
    "generation": 2,
    "outcome": "recovered",
}


@pytest.fixture
def file(tmp_path):
    def write(*events):
        path = tmp_path / "run.jsonl"
        path.write_text("".join(event if isinstance(event, str) else json.dumps(event) + "\n" for event in events))
        return str(path)

    return write


def test_table_is_aligned_and_has_the_reasons_below(file, capsys):
    slow = dict(KILLED, id="i-0002", total_ms=12345.6, decision="restart", outcome="restarted")
    slow["phases_ms"] = {"detect": 2.1, "start": 12000.0}
    assert main(["timeline", file({"event": "started", "rank": 0}, KILLED, slow)]) == 0
    lines = capsys.readouterr().out.splitlines()
    header, first, second = lines[:3]
    for name in ("detect", "rebuild", "total ms", "lost"):
        end = header.index(name) + len(name)
        assert first[end - 1].isdigit() or first[end - 1] == "-", f"{name} is right-aligned"
        assert second[end - 1].isdigit() or second[end - 1] == "-"
    assert "i-0001" in first and "03:04:05.678" in first and "exit,link" in first and "85.2" in first
    assert "12000.0" in second, "a phase that only some incidents have gets a column"
    assert "i-0001  rank 1 is replaced: its process is lost" in lines
    assert "        - rank 1, exit: killed by SIGKILL" in lines


def test_json(file, capsys):
    assert main(["timeline", "--json", file({"event": "started"}, KILLED)]) == 0
    assert json.loads(capsys.readouterr().out) == [KILLED]


def test_no_incidents(file, capsys):
    assert main(["timeline", file({"event": "launch"}, {"event": "ended", "code": 0})]) == 0
    assert capsys.readouterr().out == "No incidents.\n"


def test_a_line_cut_off_at_the_end_is_forgiven_and_an_open_incident_named(file, capsys):
    path = file(KILLED, {"event": "fault", "incident": "i-0002", "kind": "hang"}, '{"event": "incid')
    assert main(["timeline", path]) == 0
    out = capsys.readouterr().out
    assert "i-0001" in out and "i-0002  was still open when the file ended" in out


@pytest.mark.parametrize("content", ['{"event": "x"\n{"event": "y"}\n', "hello\n", '{"no": "event"}\n', "[1]\n"])
def test_another_file_is_refused(file, capsys, content):
    path = file(content)
    assert main(["timeline", path]) == 1
    assert f"{path}, line 1: not an event of a run" in capsys.readouterr().err


def test_a_file_that_can_not_be_read(tmp_path, capsys):
    assert main(["timeline", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\n")
    assert main(["timeline", str(binary)]) == 1
    assert "not a text file" in capsys.readouterr().err


def test_unknown_fields_and_missing_ones_do_not_break_the_table():
    assert "i-9" in timeline.render([{"event": "incident", "id": "i-9", "new": 1}])


def test_one_sentence_per_incident():
    one = dict(KILLED, faults=KILLED["faults"][:1])
    assert incident_line(one, warm_ranks={1}) == (
        "rank 1 was killed by SIGKILL at step 12; replaced by a warm spare and resumed at step 12 after 85 ms "
        "(detect 2, stop 8, rebuild 14, repair 21, resume 40); 0 steps lost"
    )
    assert "replaced by a new process" in incident_line(one)
    assert "and 1 more fault;" in incident_line(KILLED)
    assert "the step was run again" in incident_line(dict(one, decision="retry", restarted=[]))
    passed = incident_line(dict(one, decision="retry", restarted=[], step=13))
    assert "the others had completed the step, and it took their state and resumed at step 13" in passed
    assert incident_line(dict(one, outcome="ended")).endswith("; the job ends")


@pytest.mark.parametrize(
    "fault, words",
    [
        (
            {"kind": "exit", "exit_code": 3, "detail": "exited with code 3; ValueError: x"},
            "exited with code 3 (ValueError: x)",
        ),
        ({"kind": "exit", "exit_code": -99, "detail": ""}, "was killed by signal 99"),
        ({"kind": "stopped", "detail": "x"}, "was stopped"),
        (
            {"kind": "hang", "detail": "no progress for 2.0 s; C code holds the GIL"},
            "hung (no progress for 2.0 s; C code",
        ),
        ({"kind": "script", "detail": "told elsewhere"}, "called Evertrain in a way that can't work"),
        ({"kind": "exception", "detail": "ValueError: x\nmore"}, "raised ValueError: x"),
    ],
)
def test_faults_in_words(fault, words):
    sentence = fault_sentence({"rank": 2, "step": -1, **fault})
    assert sentence.startswith("rank 2 ") and words in sentence and "at step" not in sentence


def test_commands(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("evertrain ")
    assert main(["--help"]) == 0
    assert "launch" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["lunch"]) == 2
    assert "there is no command 'lunch'" in capsys.readouterr().err


def test_the_last_run_is_shown_and_all_on_request(file, capsys):
    end = {"event": "ended", "code": 0}
    path = file({"event": "launch"}, KILLED, end, {"event": "launch"}, end)
    assert main(["timeline", path]) == 0
    shown = "No incidents.\n(3 events of earlier runs are in the file: --all shows them)\n"
    assert capsys.readouterr().out == shown
    assert main(["timeline", "--all", path]) == 0
    assert "i-0001" in capsys.readouterr().out


def test_a_run_without_an_end(file, capsys):
    assert main(["timeline", file({"event": "launch"}, {"event": "ended", "rank": 0, "code": 0})]) == 0
    assert "did not end by itself" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "job"),
    [("bert", "bert"), ("acjob/bert", "bert"), ("ascendjobs.mindxdl.gitee.com/bert", "bert"), ("run.jsonl", None),
     ("-", None), ("./bert", None), ("Bert", None), ("acjob/a/b", None)],
)  # fmt: skip
def test_a_name_of_a_job_or_of_a_file(text, job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert incidents.job_meant(text) == job


def test_a_file_that_is_there_is_meant_unless_it_is_said_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert").write_text(json.dumps(KILLED) + "\n")
    assert incidents.job_meant("bert") is None
    assert incidents.job_meant("acjob/bert") == "bert" and incidents.job_meant("bert", certainly=True) == "bert"
    assert main(["timeline", "bert", "-o", "json"]) == 0


def test_without_a_cluster_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert main(["timeline", "bert", "--data-dir", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "there is no file bert" in told and "evertrain up" in told


@pytest.mark.parametrize("arguments", [[], ["bert", "--all"], ["-o", "yaml", "bert"]])
def test_what_makes_no_sense_is_told(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["timeline", *arguments])
    assert ended.value.code == 2 and "error:" in capsys.readouterr().err


def test_a_database_that_is_none(tmp_path, capsys):
    (tmp_path / "text").write_text("hello" * 1000)
    assert main(["timeline", "--db", str(tmp_path / "text")]) == 1
    assert "is not readable as a timeline" in capsys.readouterr().err
    assert main(["timeline", "--db", str(tmp_path / "missing"), "bert"]) == 1
    assert "there is no file" in capsys.readouterr().err


def test_what_a_job_reported_can_not_play_with_the_terminal():
    shown = incidents.render(
        [Incident("A-1", "u", "bert", "d", 0, 5, cause="\x1b[31mred\nsecond", phases=(Phase("detect", 0),))]
    )
    assert "\x1b" not in shown and "[31mred second" in shown
