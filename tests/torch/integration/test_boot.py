"""`evertrain.torch.boot` in real processes: a script must not be able to tell it from plain `python script.py`."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import evertrain
from evertrain.mindio.board import BOARD_FD, BOOT, FAULT_BOARD_FD, STACK_FD, Board, FaultBoard

TIMEOUT = 60
Done = subprocess.CompletedProcess


def write(path: Path, code: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code))
    return path


def boot(
    *argv: object, cwd: Path | None = None, fds: tuple[int, ...] = (), **env: object
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "evertrain.torch.boot", *map(str, argv)],
        cwd=cwd,
        env=environment(**env),
        pass_fds=fds,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def environment(**changes: object) -> dict[str, str]:
    # Absolute: most tests change the directory.
    path = str(Path(evertrain.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": path, **{name: str(value) for name, value in changes.items()}}


def plain(*argv: object, cwd: Path) -> Done:
    return subprocess.run(
        [sys.executable, *map(str, argv)], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT, env=environment()
    )


LOOK_AROUND = """
    import json, sys
    import neighbour
    main = sys.modules["__main__"]
    print(json.dumps({
        "name": __name__, "file": __file__, "argv": sys.argv, "path0": sys.path[0], "spec": repr(__spec__),
        "package": __package__, "doc": __doc__, "loader": type(__loader__).__name__, "cached": __cached__,
        "main": main.__dict__ is globals(), "neighbour": neighbour.__file__, "names": sorted(main.__dict__),
        "torch": "torch" in sys.modules, "annotations": __annotations__, "builtins": repr(__builtins__),
    }))
"""


@pytest.mark.parametrize("how", ["relative", "absolute", "symlink", "directory"])
def test_a_script_sees_what_it_would_see_without_boot(tmp_path, how):
    write(tmp_path / "job" / "neighbour.py", "")
    script = write(tmp_path / "job" / "train.py", LOOK_AROUND)
    write(tmp_path / "job" / "__main__.py", LOOK_AROUND)
    (tmp_path / "link.py").symlink_to(script)
    name = {"relative": "job/train.py", "absolute": script, "symlink": "link.py", "directory": "job"}[how]
    expected = json.loads(plain(name, "--lr", "0.1", "--", cwd=tmp_path).stdout)
    done = boot("--", name, "--lr", "0.1", "--", cwd=tmp_path)
    assert done.stderr == ""
    seen = json.loads(done.stdout)
    if how == "directory":
        # The interpreter leaves the path as it was given there.
        expected["path0"] = os.path.abspath(tmp_path / expected["path0"])
        expected["neighbour"] = os.path.abspath(tmp_path / expected["neighbour"])
        for key in ("file", "spec", "cached"):
            expected.pop(key), seen.pop(key)
    assert seen == expected


def test_a_module_sees_what_it_would_see_without_boot(tmp_path):
    write(tmp_path / "neighbour.py", "")
    write(tmp_path / "job" / "__init__.py", "")
    write(tmp_path / "job" / "train.py", LOOK_AROUND)
    write(tmp_path / "job" / "__main__.py", LOOK_AROUND)
    for module in ("job.train", "job"):
        expected = json.loads(plain("-m", module, "1", cwd=tmp_path).stdout)
        done = boot("--module", "--", module, "1", cwd=tmp_path)
        assert done.stderr == ""
        seen = json.loads(done.stdout)
        for look in (seen, expected):
            # Contains the address of the loader.
            look["spec"] = look["spec"].partition("loader")[0]
        assert seen == expected


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_classes_of_the_script_can_be_pickled_to_children(tmp_path, method):
    script = write(
        tmp_path / "train.py",
        f"""
        import multiprocessing, pickle

        class Sample:
            def __init__(self, value):
                self.value = value

        def double(sample):
            return Sample(sample.value * 2)

        if __name__ == "__main__":
            assert type(pickle.loads(pickle.dumps(Sample(1)))) is Sample
            with multiprocessing.get_context("{method}").Pool(1) as pool:
                print(pool.apply(double, (Sample(21),)).value)
        """,
    )
    done = boot("--", script)
    assert (done.stdout, done.stderr) == ("42\n", "")


@pytest.mark.parametrize(
    ("ending", "code", "stderr"),
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("os._exit(9)", 9, ""),
        ("pass", 0, ""),
    ],
)
def test_exit_codes_are_the_scripts(tmp_path, ending, code, stderr):
    done = boot("--", write(tmp_path / "train.py", f"import os, sys\n{ending}\n"))
    assert (done.returncode, done.stderr) == (code, stderr)


@pytest.mark.parametrize(
    "code",
    [
        "def inner():\n    raise ValueError('bad batch')\ninner()\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise RuntimeError('again') from error\n",
        "import sys\nsys.excepthook = lambda kind, error, tb: sys.stderr.write(f'mine {kind} {tb.tb_lineno}')\n1 / 0\n",
        "def broken(:\n",
        "raise KeyboardInterrupt\n",
    ],
    ids=["exception", "chained", "own hook", "syntax error", "interrupt"],
)
def test_tracebacks_are_those_of_the_script_alone(tmp_path, code):
    script = write(tmp_path / "train.py", code)
    expected = plain(script, cwd=tmp_path)
    done = boot("--", script)
    assert done.stderr == expected.stderr
    assert done.returncode == expected.returncode != 0


def test_exit_handlers_and_threads_still_find_the_scripts_main_module(tmp_path):
    script = write(
        tmp_path / "train.py",
        """
        import atexit, sys, threading

        class Sample:
            pass

        def look(where):
            print(where, sys.modules["__main__"].Sample is Sample)

        atexit.register(look, "exit handler")
        ended = threading.main_thread()
        threading.Thread(target=lambda: (ended.join(), look("thread"))).start()
        """,
    )
    assert boot("--", script).stdout.splitlines() == ["thread True", "exit handler True"]


def test_what_cannot_be_run_is_said_and_ends_with_2(tmp_path):
    for argv, message in (
        (("--", tmp_path / "missing.py"), f"can't open file '{tmp_path}/missing.py': [Errno 2] No such file"),
        (("--module", "--", "no.such.module"), "no module named no.such.module"),
        (("--", tmp_path), "can't find '__main__' module"),
        ((), "usage"),
        (("--",), "usage"),
        (("--what", "--", "x.py"), "usage"),
    ):
        done = boot(*argv)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_descriptors_work_in_the_script_and_are_not_passed_on(tmp_path):
    script = write(
        tmp_path / "train.py",
        """
        import json, os, subprocess
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        own = [os.readlink(link) for link in links if os.path.lexists(link)]
        command = ["ls", "-l", "/proc/self/fd"]
        child = subprocess.run(command, close_fds=False, capture_output=True, text=True).stdout.splitlines()
        print(json.dumps({"own": own, "child": child}))
        """,
    )
    board, faults, stack = Board(), FaultBoard(1), os.memfd_create("evertrain-stack", 0)
    fds = {BOARD_FD: board.fd, FAULT_BOARD_FD: faults.fd, STACK_FD: stack}
    before = time.monotonic()
    try:
        done = boot("--", script, fds=tuple(fds.values()), **fds)
        assert done.stderr == ""
        seen = json.loads(done.stdout)
        for name in ("evertrain-board", "evertrain-faults", "evertrain-stack"):
            assert [link for link in seen["own"] if name in link], seen
            assert not [link for link in seen["child"] if name in link], seen
        assert len(seen["child"]) >= 3
        assert board.activity == BOOT
        assert before < board.marked_at < time.monotonic()
    finally:
        board.close()
        faults.close()
        os.close(stack)


def test_the_stack_of_all_threads_can_be_asked_for_at_any_time(tmp_path):
    script = write(
        tmp_path / "train.py",
        """
        import threading, time
        def waits_in_a_thread():
            time.sleep(60)
        threading.Thread(target=waits_in_a_thread, daemon=True).start()
        def holds_on():
            print("running", flush=True)
            time.sleep(60)
        holds_on()
        """,
    )
    stack = os.memfd_create("evertrain-stack", 0)
    process = subprocess.Popen(
        [sys.executable, "-m", "evertrain.torch.boot", "--", script],
        env=environment(**{STACK_FD: stack}),
        pass_fds=(stack,),
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"running\n"
        for _ in range(2):
            os.ftruncate(stack, 0)
            os.lseek(stack, 0, os.SEEK_SET)
            process.send_signal(signal.SIGRTMIN + 8)
            text = wait_for_text(stack, "holds_on")
            assert "waits_in_a_thread" in text
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
        os.close(stack)


def wait_for_text(fd: int, wanted: str) -> str:
    """A memfd has no event for "was written to"."""
    deadline = time.monotonic() + 10
    text = ""
    while wanted not in text or not text.endswith("\n"):
        assert time.monotonic() < deadline, text
        time.sleep(0.005)
        text = os.pread(fd, 1 << 16, 0).decode()
    return text


def test_a_rank_dies_with_its_agent(tmp_path):
    script = write(tmp_path / "train.py", "import time\nprint('running', flush=True)\ntime.sleep(60)\n")
    agent = write(
        tmp_path / "agent.py",
        f"""
        import os, subprocess, sys, time
        rank = subprocess.Popen(
            [sys.executable, "-m", "evertrain.torch.boot", "--", {str(script)!r}],
            env={{**os.environ, "EVERTRAIN_AGENT_PID": str(os.getpid())}}, stdout=subprocess.PIPE,
        )
        rank.stdout.readline()
        print(rank.pid, flush=True)
        time.sleep(60)
        """,
    )
    process = subprocess.Popen([sys.executable, agent], stdout=subprocess.PIPE, env=environment())
    try:
        rank = os.pidfd_open(int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()
    assert select.select([rank], [], [], 10)[0], "the rank outlived its agent"
    os.close(rank)


def test_a_rank_whose_agent_is_already_gone_does_not_start(tmp_path):
    script = write(tmp_path / "train.py", "print('started')\n")
    done = boot("--", script, EVERTRAIN_AGENT_PID=1 if os.getpid() != 1 else 2)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "agent" in done.stderr


def test_the_compiler_is_put_off_and_the_start_is_light(tmp_path):
    script = write(
        tmp_path / "train.py",
        """
        import sys
        assert not {"torch", "msgspec", "numpy", "asyncio", "argparse"} & set(sys.modules)
        import torch
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
        assert "torch._dynamo.eval_frame" not in sys.modules
        """,
    )
    done = boot("--", script)
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_of_one_step_is_kept_for_the_next(tmp_path):
    script = write(
        tmp_path / "steps.py",
        """
        import resource

        def step():
            return [b"x" * (5 << 20) for _ in range(3)]

        step()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            step()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        """,
    )
    # One step touches 3840 pages. Somebody's own settings stay: these hand every block back.
    assert int(boot("--", script).stdout) < 1000
    assert int(boot("--", script, MALLOC_TRIM_THRESHOLD_=0).stdout) > 10_000
