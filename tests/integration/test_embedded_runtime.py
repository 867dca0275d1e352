"""The runtime process of a node: who may use it, and that it leaves nothing behind."""

from __future__ import annotations

import array
import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from evertrain.embedded.node import engine
from evertrain.embedded.node.engine import Engine, EngineLost

NOBODY = 65534


def with_word(word: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(word in part for part in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_for(condition: Any, patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def order(folder: Path, *argv: str, **more: Any) -> dict[str, Any]:
    (folder / "root").mkdir(exist_ok=True)
    return {
        "argv": list(argv),
        "env": {"PATH": os.defpath},
        "workdir": "/",
        "mounts": [],
        "staging": str(folder / "root"),
        "hostname": "pod",
        "log_folder": str(folder),
        "log_name": "0.log",
        "no_mounts": "",
        **more,
    }


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that others may enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="evertrain-test-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def interpreter_for(user: int) -> str:
    for candidate in (sys.executable, shutil.which("python3", path=os.defpath) or ""):
        try:
            done = subprocess.run([candidate, "-I", "-S", "-c", "import array, json"], user=user, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return candidate
    raise AssertionError("no Python that another user may run")


def test_an_ordinary_user_has_volumes_and_process_ids(open_folder: Path) -> None:
    """In a user namespace, in which they stay who they are."""
    user = NOBODY if os.geteuid() == 0 else os.geteuid()
    source = open_folder / "src"
    shutil.copytree(engine.ROOT / "evertrain" / "embedded" / "node", source / "evertrain/embedded/node")
    for part in ("evertrain", "evertrain/embedded"):
        shutil.copy(engine.ROOT / part / "__init__.py", source / part)
    subprocess.run(["chmod", "-R", "a+rX", str(source)], check=True)
    for name in ("trial", "volume", "log"):
        (open_folder / name).mkdir()
        (open_folder / name).chmod(0o777)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [interpreter_for(user), "-I", "-S", "-c", engine._PROGRAM, str(source), str(theirs.fileno())]
    command += [str(os.getpid()), str(open_folder / "trial")]
    runtime = subprocess.Popen(command, pass_fds=[theirs.fileno()], **({"user": user} if os.geteuid() == 0 else {}))
    theirs.close()
    line, far_end = socket.socketpair()
    with ours, line:
        try:
            assert json.loads(ours.recv(65536)) == {"mounts": "", "pids": ""}
            attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [far_end.fileno()]))]
            ours.sendmsg([b'{"do": "spawn"}'], attached)
            far_end.close()
            assert json.loads(ours.recv(65536)) == {"error": ""}
            mount = {"source": str(open_folder / "volume"), "target": "/new/place", "read_only": False}
            script = "id -u; hostname; ls /proc | grep -c '^[0-9]'; echo x > /new/place/file"
            spec = order(open_folder / "log", "sh", "-c", script, mounts=[mount], staging=str(open_folder / "trial"))
            line.sendall(json.dumps(spec).encode() + b"\n")
            line.settimeout(20)
            with line.makefile("r") as answers:
                news = [json.loads(answer) for answer in answers]
        finally:
            runtime.kill()
            runtime.wait()
    assert [item["is"] for item in news] == ["started", "exited"]
    assert news[-1] == {"is": "exited", "code": 0, "signal": 0}
    printed = [entry.split(" ", 3)[3] for entry in (open_folder / "log" / "0.log").read_text().splitlines()]
    assert printed[:2] == [str(user), "pod"]
    assert int(printed[2]) <= 5  # init, the shell and what it runs: nobody else is to be seen
    assert (open_folder / "volume" / "file").read_text() == "x\n"
    assert not Path("/new").exists()


CLUSTER = """
import asyncio, os, pathlib, sys
from embedded_nodes import pod, small_cluster

async def main():
    async with small_cluster(pathlib.Path(sys.argv[1]), isolate=sys.argv[2] == "True") as cluster:
        fork = "if os.fork(): os._exit(0)\\n"
        daemon = f"import os, time\\n{fork}os.setsid()\\n{fork}time.sleep(777.75)"
        script = f"import subprocess, sys, time\\nsubprocess.run([sys.executable, '-c', {daemon!r}])\\n"
        script += "time.sleep(777.75)"
        await cluster.create(pod("a", "python", "-c", script))
        await cluster.phase("a", "Running")
        print("running", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("isolate", [True, False])
def test_nothing_outlives_a_killed_cluster(tmp_path: Path, isolate: bool) -> None:
    path = os.pathsep.join([str(engine.ROOT), str(Path(__file__).parents[1]), *sys.path])
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, str(tmp_path), str(isolate)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert cluster.stdout is not None
        assert cluster.stdout.readline() == "running\n"
        wait_for(lambda: len([pid for pid in with_word("777.75") if pid != cluster.pid]) >= 2)
        cluster.send_signal(signal.SIGKILL)
        wait_for(lambda: not with_word("777.75"))
        wait_for(lambda: not with_word(str(tmp_path)))
    finally:
        cluster.kill()
        cluster.communicate()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_a_runtime_is_started_when_it_is_needed_and_again_after_its_death(tmp_path: Path) -> None:
    async def main() -> None:
        runtime = Engine(tmp_path)
        assert not runtime.runs
        link = await runtime.spawn()
        link.send(order(tmp_path, "sleep", "888.5"))
        started = await link.receive()
        assert started is not None and started["is"] == "started"
        (process,) = [p for p in psutil.Process().children() if "runtime.main" in " ".join(p.cmdline())]
        process.kill()
        assert await asyncio.wait_for(link.receive(), 5) is None
        runtime.forget(link)
        with pytest.raises((EngineLost, OSError)):
            await runtime.spawn()
        link = await runtime.spawn()
        link.send(order(tmp_path, "sh", "-c", "exit 4"))
        news = [await link.receive(), await link.receive()]
        assert news[1] == {"is": "exited", "code": 4, "signal": 0}
        runtime.forget(link)
        runtime.kill()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_container_that_can_not_be_set_up_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def answer(runtime: Engine, **spec: Any) -> dict[str, Any] | None:
        link = await runtime.spawn()
        link.send(order(tmp_path, "true", **spec))
        try:
            return await asyncio.wait_for(link.receive(), 10)
        finally:
            runtime.forget(link)

    async def main() -> None:
        runtime = Engine(tmp_path)
        try:
            for source, target, message in (
                ("/no/such", "/a", "/no/such is not there"),
                (str(tmp_path), "/", "nothing can be mounted on /"),
                (str(tmp_path), "/etc/passwd", "/etc/passwd is no directory"),
                (str(tmp_path / "file"), "/etc", "/etc is a directory"),
                (str(tmp_path), "/etc/passwd/below", "/etc/passwd, on the way to"),
            ):
                mount = {"source": source, "target": target, "read_only": False}
                refused = await answer(runtime, mounts=[mount])
                assert refused is not None
                assert refused["reason"] == "CreateContainerError"
                assert message in refused["message"]
            nowhere = await answer(runtime, workdir="/no/such/place")
            assert nowhere == {
                "is": "refused",
                "reason": "StartError",
                "message": 'the working directory "/no/such/place" does not exist',
            }
        finally:
            runtime.kill()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_volumes_inside_of_volumes_and_next_to_what_is_there(tmp_path: Path) -> None:
    for name in ("outer", "inner", "beside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    home = tmp_path / "home"
    (home / "there").mkdir(parents=True)
    (home / "link").symlink_to("there")

    async def main() -> None:
        runtime = Engine(tmp_path)
        try:
            wanted = [
                (tmp_path / "inner", "/data/x/inner", True),
                (tmp_path / "outer", "/data", False),
                (tmp_path / "beside", f"{home}/new", False),
            ]
            mounts = [{"source": str(s), "target": str(t), "read_only": r} for s, t, r in wanted]
            script = (
                f"ls /data /data/x/inner {home} {home}/new; readlink {home}/link; echo y > /data/kept; "
                f"echo z > {home}/there/kept; echo w > {home}/lost; touch /data/x/inner/no 2>&1"
            )
            link = await runtime.spawn()
            link.send(order(tmp_path, "sh", "-c", script, mounts=mounts))
            started, ended = await link.receive(), await link.receive()
            assert started is not None and started["is"] == "started", started
            assert ended is not None and ended["is"] == "exited"
            runtime.forget(link)
        finally:
            runtime.kill()

    asyncio.run(asyncio.wait_for(main(), 30))
    printed = [entry.split(" ", 3)[3] for entry in (tmp_path / "0.log").read_text().splitlines()]
    expected = ["/data:", "outer", "x", "", "/data/x/inner:", "inner", "", f"{home}:", "link", "new", "there"]
    assert printed[: len(expected)] == expected
    assert printed[len(expected) + 1 :][:3] == [f"{home}/new:", "beside", "there"]
    assert "Read-only file system" in printed[-1]
    assert (tmp_path / "outer" / "kept").read_text() == "y\n"
    assert (home / "there" / "kept").read_text() == "z\n"
    assert not (home / "lost").exists()
    assert not (home / "new").exists()
    assert not Path("/data/x").exists()
