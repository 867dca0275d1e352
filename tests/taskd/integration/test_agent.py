"""torchrun, changed by the documents' sed line, under a manager that follows a script: two pods of two processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evertrain.taskd import frames
from evertrain.taskd.net.node import Node
from evertrain.taskd.net.routing import Position
from tests.taskd.orders import deliver
from tests.taskd.pods import MEETING, SCRIPT, Pods, alive, faults


async def test_the_life_of_a_job(tmp_path: Path) -> None:
    """One launch for what most depends on; the rest is in the tests below."""
    options = ("--log-dir", str(tmp_path / "logs"), "--redirects", "3", "--tee", "1")
    async with Pods(tmp_path, *options, warm=(0, 1)).running() as pods:
        assert pods.first_restarts == "32767"
        pids = await pods.begin()
        await nonsense_does_nothing_and_orders_that_come_twice_count_once(pods, pids)
        pids[0] = (await pods.lives(0, 2))[0]
        pids[3] = await killed_and_replaced_by_a_spare(pods, pids)
        logs = {str(file.relative_to(tmp_path / "logs")) for file in (tmp_path / "logs").rglob("stdout.log")}
        assert {re.sub(r"none_[^/]+", "RUN", name) for name in logs} == {
            *(f"RUN/attempt_32762/{local}/stdout.log" for local in (0, 1)),
            *(f"RUN/attempt_32762/{local}/replacement_1/stdout.log" for local in (0, 1)),
        }
        await pods.printed(1, "[default1]:rank 3 is there", 2)  # the copy on the terminal goes on
        await both_are_stopped_and_replaced_one_after_the_other(pods, pids)
        for node in (0, 1):
            await pods.order(node, 208, "4")
        lived = {0: 3, 1: 2, 2: 3, 3: 4}
        new = {rank: await pods.lives(rank, count) for rank, count in lived.items()}
        assert {(kind, attempt) for _, kind, attempt in new.values()} == {("pod", str(32767 - 4))}
        assert not any(alive(pid) for pid in pids.values())
        for pid, _, _ in new.values():
            os.kill(pid, signal.SIGUSR1)
        assert [await pods.ends(node) for node in (0, 1)] == [0, 0]
        for node in (0, 1):
            end = await pods.hear(node)
            assert (end.msg_type, end.code, end.message) == ("STATUS", 203, "0")
        await new_pods_exit_on_order(pods, {rank: count + 1 for rank, count in lived.items()})


async def nonsense_does_nothing_and_orders_that_come_twice_count_once(pods: Pods, pids: dict[int, int]) -> None:
    for code, message in ((209, "null"), (209, "x"), (213, '["x"]'), (208, "many"), (999, ""), (213, "[]")):
        await pods.order(0, code, message)
    for _ in range(3):
        await deliver(pods.manager, Position("Agent", "0"), frames.body("ACTION", 209, '["0"]'), uuid="the same")
    _, kind, _ = await pods.lives(0, 2)
    assert kind == "worker" and all(alive(pids[rank]) for rank in (1, 2, 3))


async def killed_and_replaced_by_a_spare(pods: Pods, pids: dict[int, int]) -> int:
    await pods.logged(1, "a warm spare is ready")
    os.kill(pids[3], signal.SIGKILL)
    report = await pods.hear(1)
    assert faults(report) == (202, [3], 5)
    assert frames.process_ends(report.extension) == {3: frames.ProcessEnd(-9, "killed by SIGKILL")}
    assert frames.max_restarts(report.extension) == 32767
    assert report.extension and abs(int(report.extension["REPORT_FAULT_TIME"]) - time.time()) < 90
    await pods.order(1, 209, '["3"]')
    pid, kind, attempt = await pods.lives(3, 2)
    assert (kind, attempt) == ("worker", str(32767 - 5))
    assert all(alive(pids[rank]) for rank in (0, 1, 2)) and not alive(pids[3])
    await pods.logged(1, "New fault process detected, fault_rank: [3]")
    await pods.logged(1, "no additional fault process, fault_rank: [3]")
    await pods.logged(1, 'receive 209 command, start to restart workers: ["3"]')
    await pods.printed(1, "rank 3 (process")
    await pods.printed(1, "killed by SIGKILL")
    await pods.logged(1, f"process {pid} was a warm spare")
    before, after = pods.seen(3, pids[3]), pods.seen(3, pid)
    assert (before.pop("warm"), after.pop("warm")) == (False, True)
    changed = dict(before.pop("environment").items() ^ after.pop("environment").items())
    assert changed.keys() == {"RESTART_FAULT_PROCESS_TYPE", "TORCHELASTIC_ERROR_FILE"}, changed
    assert after == before, "but for being warm, it is what torchrun would have started"
    return pid


async def both_are_stopped_and_replaced_one_after_the_other(pods: Pods, pids: dict[int, int]) -> None:
    """While the second is replaced, the id of the first is nobody's, or somebody else's."""
    await pods.order(1, 213, '["2","3","99"]')
    reported = set[int]()
    while reported != {2, 3}:
        code, ranks, _ = faults(await pods.hear(1))
        assert code == 202
        reported |= set(ranks)
    assert not alive(pids[2]) and not alive(pids[3])
    for rank, count in ((3, 3), (2, 2)):
        await pods.order(1, 209, json.dumps([str(rank)]))
        pids[rank] = (await pods.lives(rank, count))[0]
    assert all(alive(pid) for pid in pids.values())


async def new_pods_exit_on_order(pods: Pods, lives: dict[int, int]) -> None:
    for node in (0, 1):
        await pods.start(node)
    for node in (0, 1):
        assert [(await pods.hear(node)).code for _ in range(2)] == [0, 201]
        await pods.order(node, 210, "0")
    pids = [(await pods.lives(rank, count))[0] for rank, count in lives.items()]
    await pods.order(0, 208, "-1")
    await pods.order(1, 203, SignalType="globalFault")
    assert [await pods.ends(node) for node in (0, 1)] == [1, 1]
    assert not any(alive(pid) for pid in pids)
    for node, why in enumerate(("no restarts are left (--max_restarts)", "the manager orders it (globalFault)")):
        assert faults(await pods.hear(node))[:2] == (202, [])
        assert why in pods.output(node)


@pytest.mark.matrix
async def test_processes_are_stopped_and_a_pod_is_told_to_exit_while_the_other_starts_again(tmp_path: Path) -> None:
    pods = Pods(tmp_path, "--max_restarts", "7")
    pods.script.write_text(MEETING + SCRIPT)
    async with pods.running():
        assert pods.first_restarts == "7"
        pids = await pods.begin("7")
        await pods.order(1, 213, '["2","3","99"]')
        reported = set()
        while reported != {2, 3}:
            code, ranks, _ = faults(await pods.hear(1))
            assert code == 202
            reported |= set(ranks)
        await pods.order(1, 203, SignalType="globalFault")
        await pods.order(0, 208, "6")
        assert faults(await pods.hear(1)) == (202, [], 7)
        assert await pods.ends(1) == 1
        assert "the manager orders it (globalFault)" in pods.output(1)
        await pods.start(1)
        assert (await pods.hear(1)).msg_type == "REGISTER"
        await pods.hear(1)
        await pods.order(1, 210, "6")
        new = {rank: await pods.lives(rank, 2) for rank in range(4)}
        assert {(kind, attempt) for _, kind, attempt in new.values()} == {("pod", "1")}
        assert not any(alive(pid) for pid in pids.values())
        for pid, _, _ in new.values():
            os.kill(pid, signal.SIGUSR1)
        assert [await pods.ends(node) for node in (0, 1)] == [0, 0]


@pytest.mark.matrix
async def test_without_restarts_left_the_agent_exits(tmp_path: Path) -> None:
    async with Pods(tmp_path).running() as pods:
        pids = await pods.begin()
        for node in (0, 1):
            await pods.order(node, 208, "-1")
        assert [await pods.ends(node) for node in (0, 1)] == [1, 1]
        assert not any(alive(pid) for pid in pids.values())
        assert "no restarts are left" in pods.output(0)


@pytest.mark.matrix
async def test_the_manager_may_go_away_and_come_back(tmp_path: Path) -> None:
    async with Pods(tmp_path).running() as pods:
        pids = await pods.begin()
        await pods.manager.close()
        os.kill(pids[1], signal.SIGKILL)
        pods.manager = Node(Position("Mgr", "0"), listen=f"127.0.0.2:{pods.manager_port}")
        await pods.manager.start()
        receiver = asyncio.ensure_future(pods._receive())
        assert faults(await pods.hear(0)) == (202, [1], 5)
        await pods.order(0, 209, '["1"]')
        await pods.lives(1, 2)
        assert all(alive(pids[rank]) for rank in (0, 2, 3))
        receiver.cancel()


@pytest.mark.matrix
async def test_processes_do_not_outlive_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    async with Pods(tmp_path).running() as pods:
        pids = await pods.begin()
        descriptors = [os.pidfd_open(pids[rank]) for rank in (0, 1)]
        pods.pods[0].kill()
        await pods.ends(0)
        for descriptor in descriptors:
            assert select.select([descriptor], [], [], 90)[0], "it lives on"
            os.close(descriptor)
        assert alive(pids[2]) and alive(pids[3])


@pytest.mark.matrix
async def test_sigterm_ends_torchrun_and_its_processes(tmp_path: Path) -> None:
    pods = Pods(tmp_path)
    saves = """
def save(*_):
    time.sleep(0.5)
    (folder / f"saved{rank}").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
"""
    pods.script.write_text("import time\n" + SCRIPT.replace("seen = {", saves + "seen = {"))
    async with pods.running():
        pids = await pods.begin()
        pods.pods[0].send_signal(signal.SIGTERM)
        assert await pods.ends(0) != 0
        assert not alive(pids[0]) and not alive(pids[1]) and alive(pids[2])
        assert all((tmp_path / f"saved{rank}").exists() for rank in (0, 1)), "they had the time to"


@pytest.mark.matrix
async def test_an_agent_that_ends_by_sigterm_still_obeys_the_order_to_exit(tmp_path: Path) -> None:
    """As when a pod is deleted in the middle of a recovery: its processes wait for nobody any more."""
    pods = Pods(tmp_path)
    ignoring = "signal.signal(signal.SIGTERM, lambda *_: (folder / f'asked{rank}').touch())\n"
    pods.script.write_text(SCRIPT.replace("seen = {", ignoring + "seen = {"))
    async with pods.running():
        pids = await pods.begin()
        begun = time.monotonic()
        pods.pods[0].send_signal(signal.SIGTERM)
        while not all((tmp_path / f"asked{rank}").exists() for rank in (0, 1)):
            await asyncio.sleep(0.02)
        assert alive(pids[0]) and alive(pids[1]), "they have their time"
        await pods.order(0, 203)
        assert await pods.ends(0) != 0
        assert time.monotonic() - begun < 25, "torchrun itself would have waited for 30 s"
        assert not alive(pids[0]) and not alive(pids[1]) and alive(pids[2])


@pytest.mark.matrix
def test_a_torchrun_that_is_not_part_of_a_job_stays_as_it_is(tmp_path: Path) -> None:
    pods = Pods(tmp_path)
    script = tmp_path / "plain.py"
    script.write_text("import os, sys; open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}', 'w')")
    environment = {key: value for key, value in os.environ.items() if key != "MINDX_TASK_ID"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(pods.torchrun), "--standalone", "--nproc_per_node", "2", str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and (tmp_path / "0").exists() and (tmp_path / "1").exists(), done


def test_a_torch_that_is_not_known_is_named(tmp_path: Path) -> None:
    """In a job that is an error; elsewhere torchrun stays as it is."""
    program = tmp_path / "p.py"
    program.write_text(
        "import os\n"
        "from torch.distributed.elastic.agent.server.api import SimpleElasticAgent as s; del s._exit_barrier\n"
        "import torch.distributed.elastic.agent.server.local_elastic_agent as a\n"
        "a.start_processes = lambda name, entrypoint, args, envs, logs_specs, log_line_prefixes: None\n"
        "import taskd.python.adaptor.patch; print('went on')\n"
        "from evertrain.taskd.agent import torch_private\n"
        "assert torch_private.unread() is None\n"
        "torch_private.torch.__version__ = '2.99.1+x'; print(torch_private.unread())\n"
        "os.environ['MINDX_TASK_ID'] = 'job-1'\n"
        "taskd.python.adaptor.patch.patch_torch_method()"
    )
    environment = {key: value for key, value in os.environ.items() if key != "MINDX_TASK_ID"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TASKD_LOG_PATH": str(tmp_path / "log")}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=100)
    first, *_, last = (line for line in done.stderr.splitlines() if "TaskD knows torch 2.4 to 2.13" in line)
    assert first.startswith("taskd: ") and "UnknownTorch" in last and done.returncode == 1
    for line in (first, last):
        assert "SimpleElasticAgent._exit_barrier" in line and "start_processes(..., start_method=...)" in line
    assert "went on" in done.stdout and "this is 2.99.1+x. What TaskD needs of it is there" in done.stdout
