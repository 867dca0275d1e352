"""The cluster is killed in each phase of a pod's start: nothing is left of it or runs twice, and the next one works."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from evertrain import aio
from evertrain.embedded import kernel
from evertrain.embedded.instance import KUBECONFIG
from evertrain.embedded.network.rtnetlink import Rtnetlink
from evertrain.kube.cache import Cache
from evertrain.kube.client import Client
from evertrain.kube.port import POD
from tests.embedded.doomed import DATA, HERE, NEXT, PATIENCE, PHASES, ends, next_one
from tests.embedded.networks import needs_networks
from tests.embedded.nodes import pod
from tests.embedded.ordinary import User, oneself, ordinary
from tests.embedded.up import Up, environment
from tests.launch.harness import ROOT
from tests.leftovers import TEST_ID

pytestmark = needs_networks
CABLE = "its first cable"
IN_THE_GATE = ("has its network", CABLE, "its mounts", "its program")


@pytest.fixture
def machine() -> Iterator[None]:
    """A network in which nobody else does anything, so that what is left there is ours. It takes root, and for others
    the cluster touches no network but those that it makes."""
    if os.geteuid() != 0:
        yield
        return
    with open("/proc/thread-self/ns/net") as home:
        kernel.unshare(kernel.CLONE_NEWNET)
        try:
            Rtnetlink().switch("lo", True)
            yield
        finally:
            kernel.enter(home.fileno(), kernel.CLONE_NEWNET)


def network() -> list[str]:
    """Links, addresses and routes of this machine."""
    net = Path("/proc/thread-self/net")
    links = [line.split(":")[0].strip() for line in (net / "dev").read_text().splitlines()[2:]]
    # How the kernel branches to addresses and routes depends on which others there were before.
    known = [line.strip() for line in (net / "fib_trie").read_text().splitlines() if "+--" not in line]
    return [*links, *known, (net / "route").read_text()]


def parts(folder: Path, beside: psutil.Process | None) -> list[psutil.Process]:
    """Processes of the clusters of this test, and of their pods, without those of the other one."""
    mark, found = os.environ[TEST_ID], []
    others = {os.getpid()}
    if beside is not None:
        others |= {each.pid for each in (beside, *beside.children(recursive=True))}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            named = any(str(folder) in word for word in process.cmdline())
            if process.pid not in others and (named or process.environ().get(TEST_ID) == mark):
                found.append(process)
    return found


def namespaces(pid: int) -> set[str]:
    """Networks that a process is in, with any of its threads, or has a descriptor of."""
    found = set()
    with contextlib.suppress(OSError):
        for link in (*Path(f"/proc/{pid}/task").glob("*/ns/net"), *Path(f"/proc/{pid}/fd").iterdir()):
            with contextlib.suppress(OSError):
                found.add(os.readlink(link))
    return {each for each in found if each.startswith("net:[")}


Held = set[tuple[int, str]]
"""A process and a network: as long as there is one, the network is."""


def held(folder: Path, beside: psutil.Process | None) -> Held:
    """The networks of the cluster of this test, by whoever holds them. A number that is free again is soon another
    network's, which some other process has then."""
    cluster = [namespaces(process.pid) for process in parts(folder, beside)]
    ours = set().union(*cluster) - namespaces(os.getpid())
    return {(pid, each) for pid in psutil.pids() for each in namespaces(pid) & ours}


async def killed_at(user: User, phase: str, beside: psutil.Process | None) -> Held:
    """The networks that it had then."""
    os.mkfifo(user.folder / HERE)
    os.chmod(user.folder / HERE, 0o666)
    process = subprocess.Popen([*user.python, "-m", "tests.embedded.doomed", str(user.folder), phase], cwd=ROOT)
    try:
        reading = asyncio.create_task(asyncio.to_thread((user.folder / HERE).read_text))
        ended = asyncio.create_task(asyncio.to_thread(process.wait))
        await asyncio.wait([reading, ended], timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        assert reading.done() and reading.result() == phase, "it did not get there"
        networks = held(user.folder, beside)
        process.kill()
        assert await ended == -signal.SIGKILL
        return networks
    finally:
        process.kill()
        process.wait()
        if not reading.done():  # a reader waits for a writer, for ever
            os.close(os.open(user.folder / HERE, os.O_RDWR | os.O_NONBLOCK))


async def end_by_the_next(user: User) -> str:
    if user.python == [sys.executable]:
        return await next_one(user.folder)
    command = [*user.python, "-m", "tests.embedded.doomed", str(user.folder), NEXT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def end_by_up_and_down(user: User) -> str:
    """As a user does it."""
    data = user.folder / DATA
    options = ("--nodes", "1", "--npus", "0", "--no-operator", "--no-clusterd", "--own-network", "--detach")

    def evertrain(*arguments: str) -> str:
        command = [*user.program, *arguments, "--data-dir", str(data)]
        done = subprocess.run(
            command, cwd=user.folder, env=environment(user.folder), capture_output=True, text=True, timeout=3 * PATIENCE
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "the cluster before did not end in order" in evertrain("up", *options)
    try:
        return await ends(data / KUBECONFIG)
    finally:
        evertrain("down")


async def scenario(
    user: User,
    phase: str,
    before: list[str],
    beside: psutil.Process | None = None,
    end: Callable[[User], Awaitable[str]] = end_by_the_next,
) -> None:
    """`before`: what the network of this machine is without it; `beside`: another cluster, which stays; `end`: how the
    next one comes, and goes."""
    networks: Held = set()

    async def gone() -> None:
        async with aio.timeout(PATIENCE):
            while parts(user.folder, beside) or network() != before or _still(networks):
                await asyncio.sleep(0.02)

    networks |= await killed_at(user, phase, beside)
    assert networks, "it had one"
    await gone()
    ended = await end(user)
    record = user.folder / "record"
    runs = record.read_text().split() if record.exists() else []
    assert len(runs) <= 1, "it was run twice"
    assert ended == "Failed" or runs, "it can't have succeeded without having run"
    await gone()


def _still(networks: Held) -> Held:
    return {(pid, each) for pid, each in networks if each in namespaces(pid)}


@pytest.mark.parametrize(
    "phase", [phase if phase in IN_THE_GATE else pytest.param(phase, marks=pytest.mark.matrix) for phase in PHASES]
)
def test_the_cluster_is_killed_while_a_pod_starts(machine: None, tmp_path: Path, phase: str) -> None:
    aio.run(scenario(oneself(tmp_path), phase, network()))


@pytest.mark.parametrize(
    "phase", [phase if phase == CABLE else pytest.param(phase, marks=pytest.mark.matrix) for phase in PHASES]
)
def test_the_cluster_of_an_ordinary_user_is_killed_while_a_pod_starts(machine: None, phase: str) -> None:
    with ordinary() as user:
        aio.run(scenario(user, phase, network()))


@pytest.mark.matrix
@pytest.mark.parametrize("who", ["oneself", "an ordinary user"])
@pytest.mark.parametrize("phase", IN_THE_GATE)
def test_after_it_was_killed_up_works_and_down_leaves_nothing(
    machine: None, tmp_path: Path, phase: str, who: str
) -> None:
    with contextlib.nullcontext(oneself(tmp_path)) if who == "oneself" else ordinary() as user:
        aio.run(scenario(user, phase, network(), end=end_by_up_and_down))


ECHO = """
import socket
with socket.create_server(("0.0.0.0", 2222)) as server, server.accept()[0] as connection:
    while True:
        connection.sendall(connection.recv(1))
"""
TALK = """
import socket, sys, time
while True:
    try:
        connection = socket.create_connection((sys.argv[1], 2222), 60)
        break
    except ConnectionRefusedError:
        time.sleep(0.02)
with open(sys.argv[2], "wb", 0) as heard:
    while True:
        connection.sendall(b"x")
        heard.write(connection.recv(1) or sys.exit("the connection has ended"))
        time.sleep(0.02)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("who", ["oneself", "an ordinary user"])
def test_a_cluster_beside_one_that_is_killed_lives_on(machine: None, tmp_path: Path, who: str) -> None:
    """What a dead one left is removed, and only that: a connection between two pods of the other one lasts."""
    with contextlib.nullcontext(oneself(tmp_path)) if who == "oneself" else ordinary() as user:
        folder = user.folder / "beside"
        folder.mkdir()
        user.owns(folder)
        up = Up(folder, "--npus", "0", "--no-operator", "--no-clusterd", "--own-network", program=user.program)
        try:
            heard = folder / "heard"

            async def main() -> None:
                kube = Client.from_kubeconfig(Path(up.environment["KUBECONFIG"]))
                try:
                    await talk(kube, heard)
                    await scenario(user, CABLE, network(), psutil.Process(up.process.pid))
                    await grows(heard)
                finally:
                    await kube.close()

            aio.run(main())
        finally:
            assert up.end() == 0, up.lines


async def talk(kube: Client, heard: Path) -> None:
    """Over one connection between pods on two nodes. The file grows as long as it lasts."""
    pods = Cache(kube, POD, "default")
    watching = asyncio.create_task(pods.run())
    try:
        await kube.create(POD, pod("server", "python3", "-c", ECHO, nodeName="node-0"))

        def address() -> str:
            return str(((pods.get("server", "default") or {}).get("status") or {}).get("podIP") or "")

        assert await pods.until(lambda: bool(address()), PATIENCE)
        await kube.create(POD, pod("client", "python3", "-c", TALK, address(), str(heard), nodeName="node-1"))
        async with aio.timeout(PATIENCE):
            while not heard.exists():
                await asyncio.sleep(0.02)
        await grows(heard)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def grows(file: Path) -> None:
    size = file.stat().st_size
    async with aio.timeout(PATIENCE):
        while file.stat().st_size == size:
            await asyncio.sleep(0.02)
