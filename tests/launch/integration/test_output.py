"""What the ranks print arrives whole, in the right place, and never costs them more than a pipe would."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from types import SimpleNamespace

import pytest

from evertrain import aio
from evertrain.launch.output import Route, Stream, Writer
from tests.launch.launching import finish, launch, start


@pytest.fixture
def script(tmp_path):
    def write(text: str):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def test_lines_are_whole_and_none_is_lost(script):
    path = script(
        "import os, sys, threading\n"
        "r = os.environ['RANK']\n"
        "for n in range(2000):\n"
        "    print(f'{r} {n} ' + 'x' * (n % 200))\n"
        "    print(f'{r} {n} ' + 'y' * (n % 200), file=sys.stderr)\n"
    )
    result = launch("--nproc-per-node=3", path)
    assert result.code == 0
    for text, letter in ((result.out, "x"), (result.err, "y")):
        lines = [line for line in text.splitlines() if line.startswith("[rank")]
        assert len(lines) == 6000
        for rank in range(3):
            mine = [line for line in lines if line.startswith(f"[rank{rank}]: ")]
            assert mine == [f"[rank{rank}]: {rank} {n} " + letter * (n % 200) for n in range(2000)]


def test_a_last_line_without_an_end_and_a_crash_right_after_it(script):
    path = script("import os\nos.write(1, b'no newline')\nos.write(2, b'\\xff bytes')\nos._exit(4)")
    launcher = start("--max-restarts=0", path)
    launcher.stdout.reconfigure(errors="replace")
    launcher.stderr.reconfigure(errors="replace")
    result = finish(launcher, time.monotonic())
    assert result.out == "[rank0]: no newline\n"
    assert "[rank0]: \ufffd bytes\n" in result.err


def test_a_very_long_line_is_passed_on_in_pieces(script):
    path = script("print('z' * 300_000)")
    result = launch(path)
    assert all(line.startswith("[rank0]: ") for line in result.out.splitlines())
    assert result.out.count("z") == 300_000


def test_progress_bars_end_their_lines_with_a_carriage_return(script):
    path = script("import sys\nsys.stdout.write('10%\\r50%\\r100%\\r\\nend\\n')")
    launcher = start(path)
    out = launcher.stdout.buffer.read()
    assert finish(launcher, time.monotonic()).code == 0
    assert out == b"[rank0]: 10%\r[rank0]: 50%\r[rank0]: 100%\r\n[rank0]: end\n"


def test_redirects_tee_and_the_filter_follow_torchrun(script, tmp_path):
    path = script("import os, sys\nprint('out', os.environ['RANK'])\nprint('err', os.environ['RANK'], file=sys.stderr)")
    logs = tmp_path / "logs"
    result = launch(
        "--nproc-per-node=3", "--log-dir", logs, "--rdzv-id=run7", "-r", "0:1,1:3", "-t", "2:3",
        "--local-ranks-filter=0,2", path,
    )  # fmt: skip
    assert result.code == 0, result
    (run,) = logs.iterdir()
    assert run.name.startswith("run7_")
    attempt = run / "attempt_0"
    assert (attempt / "0" / "stdout.log").read_text() == "out 0\n"
    assert not (attempt / "0" / "stderr.log").exists()
    assert (attempt / "1" / "stderr.log").read_text() == "err 1\n"
    assert (attempt / "2" / "stdout.log").read_text() == "out 2\n"
    assert result.out == "[rank2]: out 2\n"
    assert "[rank0]: err 0" in result.err and "err 1" not in result.err and "[rank2]: err 2" in result.err


def test_each_restart_has_its_own_log_files(script, tmp_path):
    path = script("import os, sys\nn = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('try', n)\nsys.exit(n == '0')")
    assert launch("--max-restarts=1", "--log-dir", tmp_path / "logs", "-r3", path).code == 0
    (run,) = (tmp_path / "logs").iterdir()
    assert [(run / f"attempt_{n}" / "0" / "stdout.log").read_text() for n in (0, 1)] == ["try 0\n", "try 1\n"]


def test_duplicates_of_matching_lines(script, tmp_path):
    path = script("print('an apple')\nprint('a pear')")
    launch("--log-dir", tmp_path / "logs", "--duplicate-stdout-filters", "apple,plum", path)
    (run,) = (tmp_path / "logs").iterdir()
    assert (run / "attempt_0" / "filtered_stdout.log").read_text() == "[rank0]: an apple\n"


def test_prefix_template_of_torchrun(script):
    path = script("print('x')")
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}/${rank}> "}
    assert launch("--role=tr", path, env=env).out == "<tr/0> x\n"
    option = "--log-line-prefix-template=${hostname}:${local_rank} "
    assert launch(option, path, env=env).out == f"{socket.gethostname()}:0 x\n"


def test_a_reader_that_stops_reading_blocks_the_ranks_output_but_nothing_else(script, tmp_path):
    """The launcher still sees the rank die and still ends, and all that was written comes through."""
    path = script(
        "import os, signal, threading\n"
        "def later():\n    import time; time.sleep(1.5); os.kill(os.getpid(), 9)\n"
        "threading.Thread(target=later, daemon=True).start()\n"
        "while True: print('w' * 1000)\n"
    )
    events = tmp_path / "events.jsonl"
    launcher = start("--max-restarts=0", "--ft-events", events, path)
    began = time.monotonic()
    while '"exit_code":-9' not in (events.read_text() if events.exists() else ""):
        assert time.monotonic() - began < 60, "the death was not seen while the console was blocked"
        time.sleep(0.05)
    result = finish(launcher, began)
    assert result.code == 1
    assert result.out.count("\n") > 1000


def test_a_closed_console_does_not_stop_the_job(script, tmp_path):
    path = script(f"for n in range(5000): print('x' * 100)\nopen({str(tmp_path / 'done')!r}, 'w').write('yes')")
    launcher = start(path)
    launcher.stdout.close()
    launcher.stdout = None
    result = finish(launcher, time.monotonic())
    assert result.code == 0, result
    assert (tmp_path / "done").exists()


def test_a_grandchild_that_keeps_the_pipe_open_does_not_keep_the_launcher(script):
    path = script(
        "import subprocess\nprint(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid, flush=True)\n"
    )
    result = launch(path)
    os.kill(int(result.out.split()[-1]), signal.SIGKILL)
    assert result.code == 0


def test_a_pipe_that_somebody_fills_without_end_is_closed_nevertheless(monkeypatch):
    """A grandchild in a process group of its own may write faster than we read; the loop must not stay with it."""

    async def scenario():
        reads = 0

        def endless(fd, size):
            nonlocal reads
            reads += 1
            assert reads < 1000, "it reads for ever"
            return b"n" * size

        ours, theirs = os.pipe()
        outputs = SimpleNamespace(loop=asyncio.get_running_loop(), files=Writer("files"))
        stream = Stream(outputs, ours, Writer("console"))
        stream.assign(Route(prefix=b"", console=None, file=None))
        with monkeypatch.context() as patch:
            patch.setattr(os, "read", endless)
            stream.drain()
            stream.finish()
        os.close(theirs)
        assert stream.ended.is_set()

    aio.run(scenario())
