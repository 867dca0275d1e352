"""Pods with a network of their own: real namespaces, real packets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from evertrain import aio
from evertrain.embedded.cluster import Cluster, Settings
from evertrain.embedded.network import plan
from evertrain.embedded.network.fabric import Fabric
from evertrain.embedded.power import CUT, JOINED, Cables
from evertrain.kube.cache import Cache
from evertrain.kube.client import Client
from evertrain.kube.port import POD, SERVICE, Object
from tests.embedded.networks import needs_networks, needs_reach
from tests.embedded.nodes import SmallCluster, pod, run, small_cluster, soon

SERVE = """
import socket, sys
with socket.create_server(("0.0.0.0", 2222)) as server:
    print("ready", flush=True)
    while True:
        with server.accept()[0] as connection:
            connection.sendall(sys.argv[1].encode())
"""
ASK = """
import socket, sys, time
while True:
    try:
        with socket.create_connection((sys.argv[1], 2222), 1) as connection:
            print("heard", connection.recv(100).decode(), connection.getsockname()[0], flush=True)
    except OSError as error:
        print("failed", error, flush=True)
    time.sleep(0.05)
"""


pytestmark = needs_networks


@contextlib.asynccontextmanager
async def networked(folder: Path, nodes: int = 2) -> AsyncIterator[SmallCluster]:
    fabric = await Fabric.start()
    try:
        async with small_cluster(folder, nodes, fabric=fabric) as cluster:
            yield cluster
    finally:
        fabric.close()


def python(name: str, code: str, *arguments: str, node: int = 0, **spec: object) -> dict[str, object]:
    return pod(name, "python3", "-c", code, *arguments, nodeName=f"node-{node}", **spec)


async def says(cluster: SmallCluster, name: str, words: str, after: int = 0) -> int:
    """Until the pod has said this; how much it had said by then."""
    async with aio.timeout(60):
        while words not in (text := await cluster.log(name))[after:]:
            await asyncio.sleep(0.02)
    return len(text)


def address(cluster: SmallCluster, name: str) -> str:
    return str(cluster.pod(name)["status"]["podIP"])


def test_pods_on_the_same_port_reach_each_other_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        async with networked(tmp_path) as cluster:
            for number in range(3):
                await cluster.create(python(f"server-{number}", SERVE, f"server {number}", node=number % 2))
            for number in range(3):
                await cluster.phase(f"server-{number}", "Running")
                await says(cluster, f"server-{number}", "ready")
            for number in range(3):
                asked = address(cluster, f"server-{number}")
                await cluster.create(python(f"client-{number}", ASK, asked, node=1))
                await cluster.phase(f"client-{number}", "Running")
                own = address(cluster, f"client-{number}")
                await says(cluster, f"client-{number}", f"heard server {number} {own}")
            # Neither out of the machine nor to its own loopback interface.
            for target in ("192.0.2.1", "127.0.0.1"):
                await cluster.create(python(f"lost-{target.replace('.', '-')}", ASK, target))
            await says(cluster, "lost-192-0-2-1", "Network is unreachable")
            await says(cluster, "lost-127-0-0-1", "Connection refused")

    run(main())


SYS = """
import sys
from evertrain.embedded import kernel
kernel.become_own_user_namespace()
kernel.unshare(kernel.CLONE_NEWNET | kernel.CLONE_NEWNS)
kernel.mount("sysfs", sys.argv[1], "sysfs", kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
"""


def test_a_pod_finds_its_own_nics_in_sys(tmp_path: Path) -> None:
    trial = tmp_path / "sys"
    trial.mkdir()
    if subprocess.run([sys.executable, "-c", SYS, str(trial)], capture_output=True).returncode:
        pytest.skip("a container of which parts of /sys are hidden gets no other one")
    look = "import os, socket; folder = '/sys/class/net'; print(*sorted(os.listdir(folder)))"
    look += "; print(open(folder + '/eth0/address').read())"

    async def main() -> None:
        async with networked(tmp_path, 1) as cluster:
            await cluster.create(python("a", look))
            await cluster.create(python("b", look, volumes=[VOLUME], container={"volumeMounts": [ROOT_MOUNT]}))
            for name in ("a", "b"):
                await cluster.phase(name, "Succeeded", "Failed")
                own = plan.hardware(address(cluster, name)).hex(":")
                assert await cluster.log(name) == f"eth0 eth1 lo\n{own}\n\n"

    run(main())


VOLUME = {"name": "data", "emptyDir": {}}
ROOT_MOUNT = {"name": "data", "mountPath": "/evertrain-data"}
"""Where nothing is: the pod gets a root directory of its own."""
LEADER = {"metadata": {"labels": {"role": "leader"}}}
"""Of the pod that the Service selects."""


async def service(cluster: SmallCluster) -> str:
    """Its address; leader.default.svc is its name."""
    made = await cluster.kube.create(
        SERVICE,
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "leader", "namespace": "default"},
            "spec": {"selector": {"role": "leader"}, "ports": [{"port": 2222}]},
        },
    )
    return str(made["spec"]["clusterIP"])


async def leader(cluster: SmallCluster) -> str:
    """A pod with a Service: the address of that one."""
    there = await service(cluster)
    await cluster.create(python("leader", SERVE, "the leader", **LEADER))
    return there


def test_a_service_is_reached_at_its_address(tmp_path: Path) -> None:
    async def main() -> None:
        async with networked(tmp_path) as cluster:
            there = await leader(cluster)
            await cluster.create(python("client", ASK, "leader.default.svc", node=1))
            await says(cluster, "client", "heard the leader")
            assert address(cluster, "leader") == there

    run(main())


WITH_AN_EYE_ON_ITS_ADDRESS = """
import socket, sys, threading, time
def watch():
    while True:
        with socket.socket() as probe:
            try:
                probe.bind((sys.argv[2], 0))
            except OSError:
                open(sys.argv[3], "w").close()
                return
        time.sleep(0.02)
threading.Thread(target=watch, daemon=True).start()
"""


def test_the_pod_that_follows_one_on_a_cut_node_is_reached_at_the_address_of_the_service(tmp_path: Path) -> None:
    """And stays so when the node is back, which doesn't know yet that its pod is no more."""
    lost = tmp_path / "lost"
    old = WITH_AN_EYE_ON_ITS_ADDRESS + SERVE

    async def main() -> None:
        async with networked(tmp_path) as cluster:
            there = await service(cluster)
            await cluster.create(python("leader", old, "the old leader", there, str(lost), **LEADER))
            await cluster.create(python("client", ASK, "leader.default.svc", node=1))
            await says(cluster, "client", "heard the old leader")
            await cluster.nodes["node-0"].plug(CUT)
            await cluster.kube.delete(POD, "leader", "default", grace=0)
            await cluster.gone("leader")
            cut = len(await cluster.log("client"))
            assert not lost.exists()
            await cluster.create(python("leader", SERVE, "the new leader", node=1, **LEADER))
            await soon(lost.exists, 60)
            heard = await says(cluster, "client", "heard the new leader", cut)
            assert address(cluster, "leader") == there
            await cluster.nodes["node-0"].plug(JOINED)
            for _ in range(20):
                heard = await says(cluster, "client", "heard the new leader", heard)
            assert "old" not in (await cluster.log("client"))[heard:]

    run(main())


KNOW = """
import socket, sys, time
for address in sys.argv[1:]:
    while True:
        try:
            socket.create_connection((address, 2222), 1).close()
            break
        except ConnectionRefusedError:
            break
        except OSError:
            time.sleep(0.05)
before = {}
while True:
    with open("/proc/net/arp") as file:
        known = {line.split()[0]: line.split()[3] for line in list(file)[1:]}
    for address in sys.argv[1:]:
        if known.get(address) != before.get(address):
            print(address, "is", known.get(address), flush=True)
    before = known
    time.sleep(0.02)
"""
"""Speaks to the addresses once, and says which hardware addresses they have as far as it knows, then and later."""


def test_who_knew_an_address_learns_at_once_who_has_it_now(tmp_path: Path) -> None:
    async def main() -> None:
        async with networked(tmp_path) as cluster:
            fabric = cluster.machine.fabric
            assert fabric is not None
            there, switch = await service(cluster), fabric.block.switch
            for number, node in enumerate((0, 1, 0)):
                made = await cluster.create(python("leader", SERVE, "x", node=node, **LEADER))
                await says(cluster, "leader", "ready")
                if not number:
                    await cluster.create(python("quiet", KNOW, there, switch, node=1))
                own = cluster.machine.addresses.own(made["metadata"]["uid"], node)
                await says(cluster, "quiet", f"{there} is {plan.hardware(own).hex(':')}")
                await cluster.kube.delete(POD, "leader", "default", grace=0)
                await cluster.gone("leader")
            await cluster.nodes["node-0"].plug(CUT)
            await cluster.create(python("later", KNOW, switch, node=1))
            for name in ("quiet", "later"):
                await says(cluster, name, f"{switch} is {plan.hardware(switch).hex(':')}")

    run(main())


@needs_reach
def test_this_machine_reaches_pods_and_services(tmp_path: Path) -> None:
    def heard(host: str) -> str:
        with socket.create_connection((host, 2222), 60) as connection:
            return connection.recv(100).decode()

    async def main() -> None:
        async with networked(tmp_path) as cluster:
            service = await leader(cluster)
            await cluster.create(python("other", SERVE, "the other", node=1))
            for name in ("leader", "other"):
                await cluster.phase(name, "Running")
                await says(cluster, name, "ready")
            for asked, answer in (
                (service, "the leader"),
                (address(cluster, "leader"), "the leader"),
                (address(cluster, "other"), "the other"),
            ):
                assert await asyncio.to_thread(heard, asked) == answer

    run(main())


@needs_reach
def test_pods_reach_what_listens_on_all_addresses_of_this_machine(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.create_server(("0.0.0.0", 0)) as server:
            asked = ASK.replace("2222", str(server.getsockname()[1]))
            async with networked(tmp_path, 1) as cluster:
                assert cluster.machine.fabric is not None
                await cluster.create(python("client", asked, cluster.machine.fabric.block.machine))
                await cluster.phase("client", "Running")
                server.settimeout(60)
                connection, (host, _) = await asyncio.to_thread(server.accept)
                connection.sendall(b"this machine")
                connection.close()
                assert host == address(cluster, "client")
                await says(cluster, "client", "heard this machine")

    run(main())


API_VERSION = """
import json, ssl, sys, urllib.request
with open("/keys/token") as file:
    headers = {"Authorization": "Bearer " + file.read().strip()}
request = urllib.request.Request("https://kubernetes.default.svc/version", headers=headers)
trusted = ssl.create_default_context(cafile="/keys/ca.crt")
with urllib.request.urlopen(request, context=trusted, timeout=60) as answer:
    assert json.load(answer)["gitVersion"]
"""


def test_a_pod_asks_the_api_server_by_its_name(tmp_path: Path) -> None:
    """With the cluster's own authority, and with its token."""
    volume = {"name": "keys", "hostPath": {"path": str(tmp_path / "keys")}}
    mounts = {"volumeMounts": [{"name": "keys", "mountPath": "/keys", "readOnly": True}]}

    async def main() -> None:
        settings = Settings(tmp_path, nodes=1, npus=0, operator=False, clusterd="", own_network=True)
        async with Cluster(settings) as cluster:
            kube = Client.from_kubeconfig(cluster.kubeconfig)
            pods = Cache(kube, POD, "default")
            watching = asyncio.create_task(pods.run())

            def phase() -> str:
                return str(((pods.get("asker", "default") or {}).get("status") or {}).get("phase"))

            try:
                await kube.create(POD, pod("asker", "python3", "-c", API_VERSION, container=mounts, volumes=[volume]))
                assert await pods.until(lambda: phase() in ("Succeeded", "Failed"), 60)
                logs = "\n".join(each.read_text() for each in tmp_path.rglob("0.log"))
                assert phase() == "Succeeded", logs
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await kube.close()

    run(main())


PODS = 50


def test_nothing_is_left_of_pods_that_have_ended(tmp_path: Path) -> None:
    """Neither cables in their node nor descriptors of the process that holds the network."""

    async def main() -> None:
        async with networked(tmp_path, 1) as cluster:
            fabric = cluster.machine.fabric
            assert fabric is not None and fabric._process._process is not None
            holder = Path(f"/proc/{fabric._process._process.pid}/fd")

            async def links(name: str) -> list[str]:
                command = ("cut", "-sd:", "-f1", "/proc/net/dev")
                await cluster.create(pod(name, *command, nodeName="node-0", hostNetwork=True))
                await cluster.phase(name, "Succeeded")
                return sorted((await cluster.log(name)).split())

            before, descriptors = await links("before"), len(os.listdir(holder))
            names = [f"short-{number}" for number in range(PODS)]
            for name in names:
                await cluster.create(python(name, "import socket; assert len(socket.if_nameindex()) == 3"))
            for name in names:
                await cluster.phase(name, "Succeeded")
                await cluster.kube.delete(POD, name, "default", grace=0)
            for name in names:
                await cluster.gone(name)
            async with aio.timeout(60):
                while len(os.listdir(holder)) != descriptors:
                    await asyncio.sleep(0.02)
                number = 0
                while await links(f"after-{number}") != before:  # the kernel takes namespaces away in its own time
                    number += 1

    run(main())


def test_two_pods_in_the_network_of_their_node_do_not_meet_on_a_port(tmp_path: Path) -> None:
    """They are on two nodes, or run one after the other."""

    def server(name: str) -> dict[str, object]:
        return pod(name, "python3", "-c", SERVE, name, hostNetwork=True, container={"ports": [{"containerPort": 2222}]})

    async def main() -> None:
        async with networked(tmp_path) as cluster:
            names = ("one", "two")
            for name in names:
                await cluster.create(server(name))
            for name in names:
                await cluster.phase(name, "Running")
                await says(cluster, name, "ready")
            assert {cluster.pod(name)["spec"]["nodeName"] for name in names} == {"node-0", "node-1"}
            await cluster.create(server("three"))
            told = "0/2 nodes are available: 2 node(s) didn't have free ports for the requested pod ports."
            async with aio.timeout(60):
                while f"FailedScheduling: {told}" not in await cluster.events("three"):
                    await asyncio.sleep(0.02)
            await cluster.kube.delete(POD, "one", "default", grace=1)
            await cluster.phase("three", "Running")
            await says(cluster, "three", "ready")

    run(main())


def test_a_node_that_is_cut_off_is_silent_until_it_is_joined(tmp_path: Path) -> None:
    async def main() -> None:
        async with networked(tmp_path) as cluster:
            await cluster.create(python("server", SERVE, "the server", node=0))
            await says(cluster, "server", "ready")
            await cluster.create(python("client", ASK, address(cluster, "server"), node=1))
            heard = await says(cluster, "client", "heard the server")
            await cluster.nodes["node-0"].plug(CUT)
            cut = await says(cluster, "client", "failed timed out", heard)
            await cluster.create(python("late", "print('here')", node=0))
            await cluster.kube.delete(POD, "server", "default", grace=0)
            await asyncio.sleep(0)
            assert "status" not in cluster.pod("late") or cluster.pod("late")["status"]["phase"] == "Pending"
            await cluster.nodes["node-0"].plug(JOINED)
            await cluster.phase("late", "Succeeded")
            await says(cluster, "client", "failed", cut)
            assert "heard" not in (await cluster.log("client"))[cut:].partition("failed")[2], "its object was deleted"

    run(main())


LINKS = """
import fcntl, socket, struct, time
before = None
while True:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        flags = [fcntl.ioctl(probe, 0x8913, struct.pack("256s", name)) for name in (b"eth0", b"eth1")]
    now = ["up" if struct.unpack_from("16xH", each)[0] & 0x40 else "down" for each in flags]
    if now != before:
        print(*now, flush=True)
    before = now
    time.sleep(0.02)
"""


def test_a_nic_without_its_cable(tmp_path: Path) -> None:
    """Pods see it, those that start later, too; and the other network goes on."""

    async def main() -> None:
        async with networked(tmp_path) as cluster:
            await cluster.create(python("server", SERVE, "the server", node=0))
            await says(cluster, "server", "ready")
            fabric = cluster.machine.fabric
            assert fabric is not None
            first = address(cluster, "server")
            await cluster.create(python("first", ASK, first, node=1))
            await cluster.create(python("second", ASK, fabric.block.second(first), node=1))
            await cluster.create(python("links", LINKS, node=0))
            seen = {name: await says(cluster, name, "heard the server") for name in ("first", "second")}
            await says(cluster, "links", "up up")
            await cluster.nodes["node-0"].plug(str(Cables().without("nic0")))
            await says(cluster, "links", "down up")
            await cluster.create(python("later", LINKS, node=0))
            await says(cluster, "later", "down up")
            lost = await says(cluster, "first", "failed", seen["first"])
            seen = {"first": lost, "second": len(await cluster.log("second"))}
            await says(cluster, "second", "heard the server", seen["second"])
            await cluster.nodes["node-0"].plug(JOINED)
            await says(cluster, "first", "heard the server", seen["first"])
            await says(cluster, "later", "up up")

    run(main())


def test_traffic_goes_by_the_nic_whose_address_is_asked(tmp_path: Path) -> None:
    async def main() -> None:
        async with networked(tmp_path) as cluster:
            assert cluster.machine.fabric is not None
            with pytest.raises(OSError, match="node 9 has no network yet"):
                await cluster.machine.fabric.traffic(9)
            fabric = cluster.machine.fabric
            assert fabric is not None
            await cluster.create(python("server", SERVE.replace("sys.argv[1].encode()", "b'x' * 100"), node=0))
            await says(cluster, "server", "ready")
            second = fabric.block.second(address(cluster, "server"))
            before = await fabric.traffic(0)
            await cluster.create(python("client", ASK, second, node=1))
            own = "heard " + "x" * 100
            for _ in range(20):
                await says(cluster, "client", own)
            after = await fabric.traffic(0)
            sent = {name: after[name].sent - before[name].sent for name in after}
            assert sent["nic1"] > sent["nic0"], sent

    run(main())


def test_probes_reach_a_pod_in_its_network_as_long_as_there_is_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with networked(tmp_path, 1) as cluster:
            probe = {"readinessProbe": {"tcpSocket": {"port": 2222}, "periodSeconds": 1, "failureThreshold": 1}}
            await cluster.create(python("server", SERVE, "x", container=probe))

            def is_ready(pod: Object) -> bool:
                return bool(pod["status"].get("containerStatuses", [{}])[0].get("ready"))

            await cluster.until("server", is_ready)
            assert cluster.machine.fabric is not None
            cluster.machine.fabric.close()
            await cluster.until("server", lambda p: not is_ready(p))
            ended = "the process that holds the pods' network has ended"
            assert f"Unhealthy: Readiness probe failed: {ended}" in await cluster.events("server")
            await cluster.create(python("late", SERVE, "x"))
            async with aio.timeout(60):
                while f"FailedCreatePodSandBox: {ended}" not in await cluster.events("late"):
                    await asyncio.sleep(0.05)

    run(main())


def holders() -> set[int]:
    """Process ids of ours."""
    found = psutil.Process().children()
    return {each.pid for each in found if "evertrain.embedded.network.holder" in " ".join(each.cmdline())}


def test_a_network_outlives_an_order_that_nobody_understands_and_its_end_is_noticed() -> None:
    async def main() -> None:
        before = holders()
        fabric = await Fabric.start()
        (holder,) = holders() - before
        await fabric.add_node(0)
        with pytest.raises(OSError, match="ValueError"):
            await fabric.add_pod("a pod without an address", 0, [])
        os.close(await fabric.add_pod("another", 0, fabric.block.plan.pods(0)[:1]))
        lost = asyncio.create_task(fabric.lost())
        await asyncio.sleep(0)
        assert not lost.done()
        psutil.Process(holder).kill()
        async with aio.timeout(60):
            await lost
        fabric.close()

    aio.run(main())


def test_a_network_has_room_for_more_pods_than_the_usual_limit_of_descriptors() -> None:
    async def main() -> None:
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)
        low = len(os.listdir("/proc/self/fd")) + 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, usual[1]))
        try:
            fabric = await Fabric.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        await fabric.add_node(0)
        addresses = fabric.block.plan.pods(0)
        for number in range(low):
            os.close(await fabric.add_pod(str(number), 0, [addresses[number]]))
        fabric.close()

    aio.run(main())


WITHOUT_NETWORKS = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_NET_ADMIN = 24, 12
if ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_NET_ADMIN, 0, 0, 0) != 0:
    raise OSError("prctl")
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Starts a program that may make namespaces and mounts, but not change networks, as `--cap-add SYS_ADMIN` of Docker."""
START = """
from evertrain import aio
from evertrain.embedded.network.fabric import Fabric
async def main():
    fabric = await Fabric.start()
    print(fabric.unreachable)
    fabric.close()
aio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to give up")
def test_who_may_change_mounts_but_not_networks_has_some_in_a_user_namespace() -> None:
    command = [sys.executable, "-c", WITHOUT_NETWORKS, sys.executable, "-c", START]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "only root may connect the two\n", done.stderr


ROUTES = """
from evertrain.embedded import kernel
from evertrain.embedded.network.rtnetlink import Rtnetlink
kernel.become_own_user_namespace()
kernel.unshare(kernel.CLONE_NEWNET)
link = Rtnetlink()
link.switch("lo", True)
link.add_address("lo", "10.68.0.7", 32)
link.add_route("10.73.0.0/16", "lo", 100)
link.add_route("0.0.0.0/0", "lo", 100)
link.add_route("128.0.0.0/1", "lo")
print(*sorted({str(each) for each in link.routes() if not each.is_loopback}))
"""


def test_routes_of_all_tables_and_addresses_without_a_network_are_seen() -> None:
    done = subprocess.run([sys.executable, "-c", ROUTES], capture_output=True, text=True, timeout=60)
    assert done.stdout == "10.68.0.7/32 10.73.0.0/16\n", done.stderr


def test_a_node_that_is_cut_off_when_it_starts_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with networked(tmp_path, 1) as cluster:
            assert await cluster.machine.nodes.until(lambda: cluster.machine.nodes.get("node-0") is not None, 60)
            node = cluster.start(1)
            await node.plug(CUT)
            await cluster.create(python("client", "print('here')"))
            await cluster.phase("client", "Succeeded")
            assert cluster.machine.nodes.get("node-1") is None
            await node.plug(JOINED)
            assert await cluster.machine.nodes.until(lambda: cluster.machine.nodes.get("node-1") is not None, 60)

    run(main())
    assert "cut off" not in caplog.text


def test_the_cables_of_a_node_are_changed_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It isn't joined for a moment when more is cut."""
    orders: list[object] = []
    usual = Fabric.plug

    async def plug(self: Fabric, index: int, **order: Any) -> None:
        orders.append(order)
        await usual(self, index, **order)

    async def main() -> None:
        async with networked(tmp_path, 1) as cluster:
            assert await cluster.machine.nodes.until(lambda: cluster.machine.nodes.get("node-0") is not None, 60)
            monkeypatch.setattr(Fabric, "plug", plug)
            cables = Cables().without("nic0")
            for wanted in (cables, cables.without("nic1"), cables.without()):
                await cluster.nodes["node-0"].plug(str(wanted))

    run(main())
    well = {"delay": 0.0, "loss": 0.0}
    assert orders == [
        {"joined": True, "pulled": [0]} | well,
        {"joined": True, "pulled": [0, 1]} | well,
        {"joined": False, "pulled": []} | well,
    ]


def test_a_kernel_that_knows_no_delay_and_no_loss_says_so_and_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with networked(tmp_path, 1) as cluster:
            assert await cluster.machine.nodes.until(lambda: cluster.machine.nodes.get("node-0") is not None, 60)
            await cluster.create(python("links", LINKS, node=0))
            seen = await says(cluster, "links", "up up")
            slow = Cables().without("nic1").worse(5.0, 0.1)
            try:
                await cluster.nodes["node-0"].plug(str(slow))
            except OSError as error:
                assert "this kernel has no netem" in str(error)
                await cluster.nodes["node-0"].plug(str(Cables().without("nic0")))
                seen = await says(cluster, "links", "up", seen)
                assert (await cluster.log("links")).split("\n") == ["up up", "down up", ""]
            else:
                await says(cluster, "links", "up down", seen)
                await cluster.nodes["node-0"].plug(JOINED)

    run(main())


def test_nothing_is_left_of_a_network_whose_holder_is_killed() -> None:
    def interfaces() -> set[str]:
        return set(os.listdir("/sys/class/net"))

    async def main() -> None:
        before = interfaces()
        fabric = await Fabric.start()
        block = fabric.block
        await fabric.add_node(0)
        descriptor = await fabric.add_pod("a", 0, [block.plan.pods(0)[0]])
        if not fabric.unreachable:
            assert len(interfaces() - before) == 1, "this machine's own cable"
        os.close(descriptor)
        fabric.close()
        async with aio.timeout(60):
            while interfaces() - before:
                await asyncio.sleep(0.02)
        again = await Fabric.start(str(block.network))
        assert again.block == block, "its addresses are free again"
        again.close()

    aio.run(main())


def test_two_clusters_have_different_addresses() -> None:
    async def main() -> None:
        fabrics = [await Fabric.start("10.68.0.0/14") for _ in range(2)]
        assert not fabrics[0].block.network.overlaps(fabrics[1].block.network)
        for fabric in fabrics:
            fabric.close()

    aio.run(main())
