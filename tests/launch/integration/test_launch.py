"""Scripts that know nothing of Evertrain: the launcher behaves like torchrun."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.launch.launching import finish, launch, start, wait_for


@pytest.fixture
def script(tmp_path):
    def write(text: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_environment_of_the_ranks_is_torchruns(script):
    code = """
        import json, os, sys
        print(json.dumps([dict(os.environ), sys.argv]))
    """
    path = script("\n".join(line.strip() for line in code.splitlines()))
    result = launch("--nproc-per-node=2", "--rdzv-id=job1", "--role=trainer", path, "--lr", "0.1")
    assert result.code == 0, result
    ranks = {}
    for line in result.out.splitlines():
        prefix, _, text = line.partition(": ")
        ranks[prefix], argv = json.loads(text)
        assert argv == [str(path), "--lr", "0.1"]
    assert set(ranks) == {"[rank0]", "[rank1]"}
    one = ranks["[rank1]"]
    expected = {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2", "ROLE_NAME": "trainer",
        "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "job1", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "False", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    assert {name: one.get(name) for name in expected} == expected
    assert one["MASTER_PORT"] == ranks["[rank0]"]["MASTER_PORT"] != "0"


def test_exit_code_and_first_cause(script):
    path = script("import os, time\nif os.environ['RANK'] == '1': raise ValueError('boom')\ntime.sleep(900)")
    result = launch("--nproc-per-node=2", "--max-restarts=0", path)
    assert result.code == 1, result
    assert "[rank1]: ValueError: boom" in result.err
    last = result.err.strip().splitlines()[-1]
    assert last.startswith("evertrain: first cause: rank 1") and "ValueError: boom" in last


def test_restarts_are_counted_and_then_given_up(script):
    path = script("import os\nprint('try', os.environ['TORCHELASTIC_RESTART_COUNT'])\nraise SystemExit(5)")
    result = launch("--max-restarts=2", path)
    assert result.code == 3, result
    assert [line for line in result.out.splitlines() if "try" in line] == [f"[rank0]: try {n}" for n in range(3)]
    assert "gave up" in result.err


def test_a_script_that_can_not_begin_is_not_restarted_unasked(script):
    result = launch("--nproc-per-node=2", script("import nothere"))
    assert result.code == 1, result
    assert "an error of the script" in result.err and "restart 1" not in result.err


def test_a_script_without_evertrain_is_told_so_once(script):
    result = launch("--nproc-per-node=2", script("pass"))
    assert result.code == 0, result
    assert result.err.count("does not use evertrain.torch") == 1, result


def test_a_restart_can_succeed(script):
    path = script("import os, sys\nsys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))")
    assert launch("--nproc-per-node=2", "--max-restarts=1", path).code == 0


def test_modules_programs_and_run_path(script, tmp_path):
    script("import sys; print(__name__, sys.argv[1:])", "job.py")
    result = launch("-m", "job", "x", cwd=tmp_path)
    assert result.out == "[rank0]: __main__ ['x']\n", result
    result = launch("--nproc-per-node=2", "--no-python", "/bin/sh", "-c", "echo rank $RANK; exit 0")
    assert sorted(result.out.splitlines()) == ["[rank0]: rank 0", "[rank1]: rank 1"], result
    assert launch("--run-path", tmp_path / "job.py").out == "[rank0]: __main__ []\n"
    assert launch("--max-restarts=0", "--no-python", "/bin/sh", "-c", "kill -9 $$").code == 1


def test_a_missing_script_starts_nothing(tmp_path):
    result = launch("--nproc-per-node=2", tmp_path / "missing.py")
    assert result.code == 2 and "does not exist" in result.err


def test_print_config():
    result = launch("--ft-bound=1", "--print-config", env={"EVERTRAIN_WARM": "0"})
    assert result.code == 0
    assert "timing.first_step" in result.out and "EVERTRAIN_WARM" in result.out


def test_sigterm_reaches_the_script_and_gives_143(script, tmp_path):
    path = script(
        "import signal, sys, time, os\n"
        "def bye(*_):\n    print('bye', os.environ['RANK'], flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, bye)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    began = time.monotonic()
    launcher = start("--nproc-per-node=2", path)
    assert {launcher.stdout.readline(), launcher.stdout.readline()} == {"[rank0]: up\n", "[rank1]: up\n"}
    launcher.send_signal(signal.SIGTERM)
    result = finish(launcher, began)
    assert result.code == 143, result
    assert "bye 0" in result.out and "bye 1" in result.out


def test_sigint_gives_130_and_a_script_that_ignores_it_is_killed_after_the_grace_period(script):
    path = script("import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(900)")
    launcher = start("--ft-grace=0.5", path)
    launcher.stdout.readline()
    began = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    result = finish(launcher, began)
    assert result.code == 130, result
    assert result.seconds > 0.4


def test_a_second_signal_ends_at_once(script):
    path = script("import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(900)")
    launcher = start("--ft-grace=900", path)
    launcher.stdout.readline()
    began = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    launcher.stderr.readline()
    launcher.send_signal(signal.SIGTERM)
    result = finish(launcher, began)
    assert result.code == 143, result


@pytest.mark.parametrize("options", [[], ["--no-python"]])
def test_no_rank_outlives_a_killed_launcher(script, options):
    path = script("#!/usr/bin/env python3\nimport os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    path.chmod(0o755)
    launcher = start("--nproc-per-node=2", *options, path, env={"PYTHONUNBUFFERED": "1"})
    pids = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
    ranks = [psutil.Process(pid) for pid in pids]
    launcher.kill()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    launcher.communicate()
    assert not alive


def test_children_do_not_survive_their_rank(script):
    path = script(
        "import os, subprocess, sys\n"
        "for group in (None, 0):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], process_group=group)\n"
        "    print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    result = launch("--max-restarts=0", path)
    assert result.code == 1, result
    pids = [int(line.split()[-1]) for line in result.out.splitlines()]
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of the children", 5)


def test_the_job_is_its_own_session_so_that_ctrl_c_goes_to_the_launcher_only(script):
    path = script("import os\nprint(os.getsid(0) == os.getpid(), flush=True)")
    assert launch(path).out == "[rank0]: True\n"


def test_virtual_local_rank(script):
    path = script("import os\nprint(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'])")
    result = launch("--nproc-per-node=2", "--virtual-local-rank", path, env={"CUDA_VISIBLE_DEVICES": "4,7"})
    assert sorted(result.out.splitlines()) == ["[rank0]: 0 0 4", "[rank1]: 1 0 7"]


def test_a_second_launcher_in_a_rank_works(script):
    """Nothing of the outer job's environment confuses an inner launcher."""
    inner = script(
        "import json, os\n"
        "own = [os.environ.get(f'EVERTRAIN_{name}') for name in ('CHECKPOINT_DIR', 'CHECKPOINT_EVERY', 'STANDBY')]\n"
        "bound = json.loads(os.environ['EVERTRAIN_TIMING'])['bound']\n"
        "print('inner', os.environ['RANK'], os.environ['WORLD_SIZE'], own, bound)",
        "inner.py",
    )
    outer = script(
        "import subprocess, sys\n"
        "command = [sys.executable, '-m', 'evertrain.cli.main', 'launch', '--nproc-per-node=2', '--ft-bound=3']\n"
        f"sys.exit(subprocess.call([*command, {str(inner)!r}]))",
        "outer.py",
    )
    options = ("--ft-bound=1", "--ft-standby=1", "--ft-checkpoint-dir=outer", "--ft-checkpoint-every=5")
    result = launch(*options, outer)
    assert result.code == 0, result
    assert "[rank0]: [rank1]: inner 1 2 [None, None, None] 3.0" in result.out, result
