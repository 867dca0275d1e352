"""Spares in real processes, waiting in front of the script or in the middle of it."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import evertrain
from evertrain.mindio.board import BOARD_FD, BOOT, Board
from evertrain.mindio.timing import Timing

TIMEOUT = 100


class Spare:
    """A spare process and the agent's end of its socket."""

    def __init__(self, **env: object) -> None:
        self.link, inherited = socket.socketpair()
        self.link.settimeout(TIMEOUT)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "evertrain.torch.spare"],
            env={
                **{name: value for name, value in os.environ.items() if "RANK" not in name},
                "PYTHONPATH": str(Path(evertrain.__file__).parents[1]),
                "OMP_NUM_THREADS": "1",
                "EVERTRAIN_SPARE_FD": str(inherited.fileno()),
                "EVERTRAIN_AGENT_PID": str(os.getpid()),
                **{name: str(value) for name, value in env.items()},
            },
            pass_fds=(inherited.fileno(), *(int(value) for name, value in env.items() if name.endswith("_FD"))),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        inherited.close()
        self._lines = self.link.makefile("r")

    def hears(self) -> dict | None:
        line = self._lines.readline()
        return json.loads(line) if line else None

    def promote(self, *argv: object, **env: str | None) -> None:
        self.link.sendall(json.dumps({"env": env, "argv": [str(word) for word in argv]}).encode() + b"\n")

    def ends(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, stdout, stderr

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._lines.close()
        self.link.close()


@pytest.fixture
def start_spare() -> Iterator[Callable[..., Spare]]:
    spares: list[Spare] = []

    def start(**env: object) -> Spare:
        spares.append(Spare(**env))
        return spares[-1]

    yield start
    for spare in spares:
        spare.close()


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(code: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(code))
        return path

    return write


def parked(script: Path, *arguments: str) -> dict[str, str]:
    return {"EVERTRAIN_PARK": "1", "EVERTRAIN_PARK_ARGV": json.dumps(["--", str(script), *arguments])}


# --- waiting in front of the script ----------------------------------------------------------------------------------


def test_a_promoted_spare_runs_the_script_as_its_rank(start_spare, script):
    path = script(
        """
        import os, sys
        assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
        print(sys.argv[1:], os.environ["RANK"], "GONE" in os.environ, "EVERTRAIN_SPARE_FD" in os.environ)
        sys.exit(5)
        """
    )
    board = Board()
    spare = start_spare(GONE="yes", **{BOARD_FD: board.fd})
    assert spare.hears() == {"ready": True}
    promoted = time.monotonic()
    spare.promote("--", path, "--lr", "1", RANK="3", GONE=None)
    assert spare.ends() == (5, "['--lr', '1'] 3 False False\n", "")
    assert spare.hears() is None
    assert (board.activity, board.marked_at > promoted) == (BOOT, True)
    board.close()


@pytest.mark.parametrize("rank", ["0", "31", "1234567", "12345678"])
@pytest.mark.parametrize("place", [["--rank", "unknown"], []])
def test_the_rank_shows_on_the_command_line_where_there_is_a_place(rank, place):
    code = (
        "import os, sys; from evertrain.mindio.title import show_rank; show_rank(sys.argv[1]); "
        "print(open('/proc/self/cmdline').read().split(chr(0))[4:], sys.argv[2:])"
    )
    words = [*place, "--", "train.py", "--rank"]
    command = [sys.executable, "-c", code, rank, *words]
    env = {**os.environ, "PYTHONPATH": str(Path(evertrain.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=TIMEOUT, check=True)
    shown = list(words)
    if place and len(rank) <= 7:
        shown[1] = rank.ljust(7)
    assert done.stdout == f"{[*shown, '']} {words}\n"


def test_a_spare_that_nobody_needs_ends_silently(start_spare):
    spare = start_spare()
    assert spare.hears() == {"ready": True}
    spare.link.shutdown(socket.SHUT_RDWR)
    assert spare.ends() == (0, "", "")


@pytest.mark.matrix
def test_warming_up_leaves_no_trace_in_the_script(start_spare, script):
    path = script(
        """
        import json, os, random, subprocess, sys, threading, warnings
        import numpy, torch
        import torch.distributed as dist
        descriptors = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True)
        again = torch.Generator().manual_seed(torch.initial_seed())
        print(json.dumps({
            "unused_generator": torch.equal(torch.default_generator.get_state(), again.get_state()),
            "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
            "modes": [torch.is_grad_enabled(), str(torch.get_default_dtype()), dist.is_initialized()],
            "hooks": [len(warnings.filters), sys.excepthook is sys.__excepthook__],
            "sockets": descriptors.stdout.count("socket:"),
            "main": sorted(globals()),
            "environment": sorted(name for name in os.environ if not name.startswith(("EVERTRAIN_", "PYTHONPATH"))),
        }))
        print(json.dumps([random.random(), float(numpy.random.rand()), float(torch.rand(1))]))
        """
    )
    fresh = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": "0"}
    )
    spares = [start_spare() for _ in range(2)]
    outputs = []
    for spare in spares:
        assert spare.hears() == {"ready": True}
        spare.promote("--", path, RANK="0")
        code, stdout, stderr = spare.ends()
        assert (code, stderr) == (0, "")
        outputs.append(stdout.splitlines())
    assert [json.loads(lines[0]) for lines in outputs] == [json.loads(fresh.stdout.splitlines()[0])] * 2
    # Seeded by the operating system, as in a fresh process.
    numbers = {number for lines in outputs for number in json.loads(lines[1])}
    assert len(numbers) == 6


def test_everything_a_first_step_needs_is_warm_and_promotion_is_quick(start_spare, script):
    path = script(
        """
        import time
        at_first_line = time.monotonic()
        import sys
        before = set(sys.modules)
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1))
        optimizer = torch.optim.AdamW(model.parameters())
        for (batch,) in DataLoader(TensorDataset(torch.ones(4, 8)), 2, num_workers=1):
            loss = model(batch).sum()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
        print(at_first_line)
        print([name for name in set(sys.modules) - before])
        """
    )
    delays = []
    for _ in range(3):
        spare = start_spare()
        assert spare.hears() == {"ready": True}
        # Let it get into its read.
        while Path(f"/proc/{spare.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "S":
            time.sleep(0.001)
        sent = time.monotonic()
        spare.promote("--", path, RANK="0")
        code, stdout, stderr = spare.ends()
        assert (code, stderr) == (0, "")
        first_line, new_modules = stdout.splitlines()
        delays.append(float(first_line) - sent)
        assert new_modules == "[]"
    print(f"promotion to first line: {[f'{delay * 1e3:.2f} ms' for delay in delays]}")
    # 1 ms on an idle machine; a busy one must not fail this test.
    assert statistics.median(delays) < 0.05


@pytest.mark.matrix
def test_modules_asked_for_are_imported_and_a_broken_one_is_only_a_warning(start_spare, script, tmp_path):
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no licence')")
    path = script("import sys; print('colorsys' in sys.modules, 'torch._dynamo.config' in sys.modules)")
    spare = start_spare(
        EVERTRAIN_WARM_IMPORTS="colorsys, broken_module,no_such_module,torch._dynamo",
        PYTHONPATH=f"{tmp_path}:{Path(evertrain.__file__).parents[1]}",
    )
    assert spare.hears() == {"ready": True}
    spare.promote("--", path, RANK="0")
    code, stdout, stderr = spare.ends()
    assert (code, stdout) == (0, "True True\n")
    warned = stderr.splitlines()
    assert len(warned) == 2, stderr
    assert "broken_module" in warned[0] and "no licence" in warned[0]
    assert "no_such_module" in warned[1]


def test_an_exception_of_the_script_shows_only_the_script(start_spare, script):
    path = script("raise ValueError('bad batch')")
    spare = start_spare()
    assert spare.hears() == {"ready": True}
    spare.promote("--", path, RANK="0")
    plain = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert spare.ends() == (1, "", plain.stderr)


# --- parked in the middle of the script ------------------------------------------------------------------------------

READS = {
    "getitem": "os.environ['RANK']",
    "get": "os.environ.get('LOCAL_RANK')",
    "getenv": "os.getenv('RANK', '0')",
    "contains": "'RANK' in os.environ and os.environ['RANK']",
    "setdefault": "os.environ.setdefault('RANK', '0')",
    "bytes": "os.environb[b'RANK'].decode()",
    "copy": "os.environ.copy()['RANK']",
    "dict": "dict(os.environ)['RANK']",
    "items": "[value for name, value in os.environ.items() if name == 'RANK'][0]",
    "merge": "{**os.environ}['RANK']",
    "or": "(os.environ | {})['RANK']",
    "subprocess": "subprocess.check_output(['sh', '-c', 'echo $RANK'], text=True).strip()",
    "fork": "in_a_fork()",
    "system": "str(os.waitstatus_to_exitcode(os.system('exit $RANK')))",
    "wait_for_rank": "(wait_for_rank(), os.environ['RANK'])[1]",
}


@pytest.mark.matrix
def test_every_way_to_ask_for_the_rank_waits_for_it(start_spare, script):
    """One process for all of them: each forgets the rank again and is parked anew, without a second warm-up."""
    path = script(
        f"""
        import json, os, socket, subprocess
        from evertrain.torch import parking
        from evertrain.torch.spare import wait_for_rank

        def in_a_fork():
            read, write = os.pipe()
            if os.fork() == 0:
                os.write(write, os.environ["RANK"].encode())
                os._exit(0)
            os.wait()
            return os.read(read, 10).decode()

        ways = {READS!r}
        for name, expression in [("first", "os.environ['RANK']"), *ways.items()]:
            if name != "first":
                for variable in ("RANK", "LOCAL_RANK"):
                    os.environ.pop(variable, None)
                agent, own = socket.socketpair()
                parking.park(parking.Link(own.detach()))
                order = {{"env": {{"RANK": "7", "LOCAL_RANK": "7"}}}}
                agent.sendall(json.dumps(order).encode() + b"\\n")
            assert os.environ.get("UNRELATED") == "1" and "HOME_OF_NOBODY" not in os.environ
            assert (name == "first") or parking.is_parked()
            value = eval(expression)
            assert not parking.is_parked() and type(os.environ) is os._Environ
            told = "" if name == "first" else json.loads(agent.recv(1000))["parked"]
            print(json.dumps([name, value, told]))
            if name != "first":
                agent.close()
        """
    )
    spare = start_spare(UNRELATED=1, **parked(path))
    answer = spare.hears()
    assert answer["ready"] is True
    spare.promote(RANK="7", LOCAL_RANK="7")
    code, stdout, stderr = spare.ends()
    assert (code, stderr) == (0, "")
    results = [json.loads(line) for line in stdout.splitlines()]
    assert [name for name, _, _ in results] == ["first", *READS]
    assert {value for _, value, _ in results} == {"7"}
    told = {name: text for name, _, text in results}
    assert "reads LOCAL_RANK" in told["get"]
    assert "reads the whole environment" in told["dict"]
    assert "starts a process" in told["subprocess"]


def test_a_parked_script_has_run_up_to_its_rank(start_spare, script):
    path = script(
        """
        import os, sys, time
        print("before", sys.argv[1:], os.environ["UNRELATED"], flush=True)
        import torch
        torch.manual_seed(5)
        expected = torch.Generator().manual_seed(5)
        rank = int(os.environ["RANK"])
        woken = time.monotonic()
        assert torch.equal(torch.rand(3), torch.rand(3, generator=expected))
        print("rank", rank, os.environ["EVERTRAIN_INCARNATION"], "EVERTRAIN_PARK" in os.environ, woken, flush=True)
        """
    )
    spare = start_spare(UNRELATED=1, **parked(path, "--lr", "1"))
    assert spare.process.stdout.readline() == "before ['--lr', '1'] 1\n"
    assert spare.hears() == {"ready": True, "parked": "train.py:7 reads RANK"}
    assert spare.process.poll() is None
    sent = time.monotonic()
    spare.promote("--", path, "--lr", "1", RANK="2", EVERTRAIN_INCARNATION="4")
    code, stdout, stderr = spare.ends()
    assert (code, stderr) == (0, "")
    *words, woken = stdout.split()
    assert words == ["rank", "2", "4", "False"]
    assert float(woken) - sent < 0.05


@pytest.mark.matrix
def test_a_parked_spare_that_nobody_needs_ends_silently(start_spare, script):
    path = script("import os\nprint('before')\nos.environ['RANK']\nprint('after')")
    spare = start_spare(**parked(path))
    assert spare.hears()["parked"].startswith("train.py:3")
    spare.link.shutdown(socket.SHUT_RDWR)
    code, stdout, stderr = spare.ends()
    assert (code, stdout.strip(), stderr) == (0, "before", "")


@pytest.mark.parametrize(
    ("code", "exit_code", "error"),
    [
        ("print('done')", 0, "the script ended before it asked for its rank"),
        ("raise ValueError('bad')", 1, "the script raised ValueError: bad before it asked for its rank"),
        ("import sys; sys.exit(4)", 4, "the script raised SystemExit: 4 before it asked for its rank"),
    ],
)
def test_a_script_that_never_asks_for_its_rank_is_reported(start_spare, script, code, exit_code, error):
    spare = start_spare(**parked(script(code)))
    assert spare.hears() == {"ready": False, "error": error}
    assert spare.hears() is None
    ended, _, stderr = spare.ends()
    assert ended == exit_code
    assert error in stderr


def test_threads_of_a_parked_script_wait_as_well(start_spare, script):
    path = script(
        """
        import os, threading
        ranks = []
        threads = [threading.Thread(target=lambda: ranks.append(os.environ["RANK"])) for _ in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(ranks)
        """
    )
    spare = start_spare(**parked(path))
    assert spare.hears()["ready"] is True
    time.sleep(0.1)
    spare.promote(RANK="6")
    assert spare.ends()[:2] == (0, "['6', '6', '6']\n")


def test_a_parked_script_may_import_training_before_it_asks_for_its_rank(start_spare, script):
    path = script(
        """
        from evertrain.torch import Training
        import torch.distributed as dist
        model = "built"
        import os
        print(model, os.environ["RANK"])
        """
    )
    spare = start_spare(
        **parked(path),
        WORLD_SIZE=2,
        EVERTRAIN_CONTROLLER="127.0.0.1:1",
        EVERTRAIN_TIMING=json.dumps(dataclasses.asdict(Timing.derive())),
    )
    assert spare.hears() == {"ready": True, "parked": "train.py:6 reads RANK"}
    spare.promote(RANK="1")
    assert spare.ends() == (0, "built 1\n", "")


def test_what_the_ranks_have_imported_of_torch_is_imported_beforehand(start_spare, script):
    path = script(
        """
        import os, sys
        print("torch.distributed.fsdp" in sys.modules, "this" in sys.modules, "EVERTRAIN_LEARNED_IMPORTS" in os.environ)
        """
    )
    spare = start_spare(EVERTRAIN_LEARNED_IMPORTS="torch.distributed.fsdp,torch.not_there,this")
    assert spare.hears() == {"ready": True}
    spare.promote("--", path, RANK="0")
    assert spare.ends() == (0, "True False False\n", "")
