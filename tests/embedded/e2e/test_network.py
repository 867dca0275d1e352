"""Clusters whose pods have a network of their own: jobs and clusters that use the same ports don't meet."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.networks import needs_networks
from tests.embedded.ordinary import User, oneself, ordinary
from tests.embedded.up import Up, evertrain, example_job, needs_kubectl, small_job

pytestmark = needs_kubectl
PORT = 2222

MEET = """
import os, socket, time
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
assert address[1] == 2222
if os.environ["RANK"] == "0":
    with socket.create_server(("0.0.0.0", 2222)) as server:
        with server.accept()[0] as other:
            other.sendall(os.environ["JOB"].encode())
            assert other.recv(10) == b"thanks"
        while not os.path.exists(os.environ["GO"]):  # until all jobs listen at the same time
            time.sleep(0.05)
else:
    while True:
        try:
            with socket.create_connection(address, 5) as first:
                heard = first.recv(100).decode()
                first.sendall(b"thanks")
                break
        except OSError:
            time.sleep(0.05)
    print("heard", heard, "with", sorted(name for _, name in socket.if_nameindex()))
"""


@pytest.fixture(params=["oneself", "an ordinary user"])
def user(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[User]:
    if request.param == "oneself":
        yield oneself(tmp_path)
        return
    with ordinary() as found:
        yield found


def meeting(folder: Path) -> Path:
    script = folder / "meet.py"
    script.write_text(MEET)
    return script


def start(up: Up, script: Path, name: str) -> None:
    go = script.parent / "go"
    up.kubectl("apply", "-f", "-", stdin=small_job(name, f"JOB={name} GO={go} exec python3 {script}"))


def met(up: Up, name: str) -> None:
    up.kubectl("wait", "--for=condition=Succeeded", f"acjob/{name}", "--timeout=200s")
    assert up.kubectl("logs", f"{name}-worker-0").stdout == f"heard {name} with ['eth0', 'eth1', 'lo']\n"


@needs_networks
def test_two_clusters_with_two_jobs_each_on_the_same_port_at_the_same_time(user: User) -> None:
    ups = []
    script = meeting(user.folder)
    try:
        for number in (0, 1):
            folder = user.folder / f"cluster-{number}"
            folder.mkdir()
            user.owns(folder)
            ups.append(Up(folder, program=user.program))
        ups[1].wait_for_line(r"serves .* on 127\.0\.0\.1:\d+, for 127\.0\.0\.1:8899 is in use", 60)
        for up in ups:
            for name in ("one", "two"):
                start(up, script, name)
        for up in ups:
            for name in ("one", "two"):
                up.kubectl("wait", "--for=condition=Ready", "pod", f"{name}-master-0", "--timeout=200s")
                up.kubectl(
                    "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod", f"{name}-worker-0", "--timeout=200s"
                )
        script.with_name("go").touch()
        for up in ups:
            for name in ("one", "two"):
                met(up, name)
        ranges = {
            json.loads(up.kubectl("get", "nodes", "-o", "json").stdout)["items"][0]["spec"]["podCIDR"] for up in ups
        }
        assert len(ranges) == 2, "each has addresses of its own"
        for up in ups:
            uid = up.get("acjob", "one")["metadata"]["uid"]
            refused = up.evertrain("switch-nic", "one", "--node", "node-0", "--dev", "0", "--op", "true", check=False)
            assert f"job:{uid} is not registered" in refused.stderr, "it is the job's own ClusterD that is asked"
        slow = ups[0].evertrain("node", "slow", "node-1", "--delay", "5ms", "--loss", "0.1%", check=False)
        if slow.returncode == 0:
            assert slow.stdout == "node-1 is delayed by 5ms; losing 0.1%\n"
            ups[0].evertrain("node", "join", "node-1")
        else:
            assert "node-1: delayed by 5ms; losing 0.1% is not possible: this kernel has no netem" in slow.stderr
        for order, told, state in (
            (("cut", "--nic", "nic1"), "is without nic1", "without"),
            (("cut",), "cut off", "cut"),
            (("cut", "--nic", "nic0"), "cut off", "cut"),
            (("join",), "joined", "joined"),
        ):
            assert ups[0].evertrain("node", *order, "node-1").stdout == f"node-1 {told}\n"
            rows = ups[0].evertrain("node", "list").stdout.splitlines()[1:]
            assert [row.split()[:3] for row in rows] == [["node-0", "on", "joined"], ["node-1", "on", state]]
            rows = ups[0].evertrain("node", "nics", "node-1").stdout.splitlines()[1:]
            down = "down" if state == "without" else "up"
            assert [row.split()[:3] for row in rows] == [["node-1", "nic0", "up"], ["node-1", "nic1", down]]
        counted = json.loads(ups[0].evertrain("node", "nics", "-o", "json").stdout)
        assert [(each["node"], each["nic"]) for each in counted] == [
            (node, nic) for node in ("node-0", "node-1") for nic in ("nic0", "nic1")
        ]
        assert all(each["received"] and each["sent"] for each in counted if each["nic"] == "nic0"), counted
        raw = json.loads(ups[0].kubectl("get", "--raw", "/api/v1/nodes/node-1/proxy/stats/summary").stdout)
        assert [each["name"] for each in raw["node"]["network"]["interfaces"]] == ["nic0", "nic1"]
    finally:
        codes = [up.end() for up in ups]
    assert codes == [0, 0]


@needs_networks
def test_a_cluster_whose_network_is_gone_says_so_and_ends(tmp_path: Path) -> None:
    up = Up(tmp_path, "--own-network", "--clusterd-addr", "127.0.0.1:0")
    try:
        (holder,) = [each for each in up.pod_processes() if "evertrain.embedded.network.holder" in each.cmdline()[4]]
        holder.kill()
        up.wait_for_line("^evertrain up: the process that holds the pods' network has ended, and so does the clus", 60)
        assert up.process.wait(60) == 1
    finally:
        up.end()


REFUSED = """
import contextlib, os, sys
from evertrain.embedded import kernel
with contextlib.suppress(OSError):  # then it is so already
    kernel.become_own_user_namespace()
    for kind in ("user", "net"):
        with open(f"/proc/sys/user/max_{kind}_namespaces", "w") as file:
            file.write("0")
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Starts a program where the kernel allows no further namespaces for networks."""


def test_where_namespaces_are_not_allowed_jobs_on_the_same_port_run_one_after_the_other(
    tmp_path: Path,
) -> None:
    up = Up(tmp_path, "--clusterd-addr", "127.0.0.1:0", program=(sys.executable, "-c", REFUSED, *evertrain()))
    try:
        said = up.wait_for_line("Pods share the network of this machine", 60)
        assert "(no more namespaces are allowed, see user.max_user_namespaces and user.max_" in said.string
        remedy = "run the cluster as root, or allow user namespaces" if os.geteuid() else "allow namespaces"
        assert f"one after the other; for networks of their own {remedy} (docs/virtual-nodes.md)." in said.string
        job = small_job("first", f"until [ -e {tmp_path / 'first'} ]; do sleep 0.05; done")
        up.kubectl("apply", "-f", "-", stdin=job)
        up.kubectl("wait", "--for=condition=Running", "acjob/first", "--timeout=200s")
        up.kubectl("apply", "-f", "-", stdin=small_job("second", "true"))

        def refused(pod: Any) -> bool:
            told = [each.get("message", "") for each in (pod.get("status") or {}).get("conditions") or ()]
            return any("port 2222 is that of pod default/first-master-0" in each for each in told)

        up.until(refused, "pods", "-l", "job-name=second")
        events = up.kubectl("get", "events", "--field-selector=reason=FailedScheduling").stdout
        assert "start the cluster with --own-network, which says what is missing" in events
        for _ in range(2):
            told = up.evertrain("node", "cut", "node-0", check=False)
            assert told.returncode == 1 and "cut is not possible: its pods are in the network of this" in told.stderr
        (tmp_path / "first").touch()
        for name in ("first", "second"):
            up.kubectl("wait", "--for=condition=Succeeded", f"acjob/{name}", "--timeout=200s")
    finally:
        assert up.end() == 0, up.lines
    refused_again = subprocess.run(
        [sys.executable, "-c", REFUSED, *evertrain("up", "--own-network")],
        env=up.environment, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert refused_again.returncode == 1
    assert "pods can't have networks of their own: " in refused_again.stderr


COPIES, PODS = 10, 20
LISTENING = f"""
import os, socket, subprocess, sys, time
def all_are(what):
    open(os.path.join(what, os.environ["HOSTNAME"]), "w").close()
    while len(os.listdir(what)) < {PODS}:
        time.sleep(0.05)
with socket.create_server(("", 9601)):
    with socket.create_server(("", {PORT})):
        all_are("listening")
    all_are("ready")  # nobody connects to a port that is not the training's
    sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))
"""
"""Holds the ports of torch's store and of TaskD's manager until all pods of all jobs do. The first one is then the
training's, which it runs; the second it keeps."""


@pytest.mark.matrix
@pytest.mark.timeout(900)
@needs_networks
def test_ten_copies_of_the_sample_at_once(user: User) -> None:
    file = example_job(user.folder, PORT)
    alone = "cd /job/code; python3 train.py"
    assert alone in file.read_text()
    (user.folder / "code" / "listening.py").write_text(LISTENING)
    for what in ("listening", "ready"):
        (user.folder / "code" / what).mkdir()
    file.write_text(file.read_text().replace(alone, "cd /job/code; exec python3 listening.py train.py"))
    user.owns(user.folder)
    up = Up(user.folder, "--nodes", "4", "--clusterd-addr", "127.0.0.1:0", "--npus", "16",
            "--node-label", "example-key=example-value", program=user.program)  # fmt: skip
    try:
        names = [f"sample-{number}" for number in range(COPIES)]
        for name in names:
            up.kubectl("apply", "-f", "-", stdin=file.read_text().replace("default-test-pytorch", name))
        with concurrent.futures.ThreadPoolExecutor(len(names)) as waiting:
            list(
                waiting.map(
                    lambda name: up.kubectl(
                        "wait", "--for=condition=Succeeded", f"acjob/{name}", "--timeout=800s", timeout=820
                    ),
                    names,
                )
            )
        weights = {up.kubectl("logs", f"{name}-master-0").stdout.split("weights ")[-1] for name in names}
        assert len(weights) == 1, "they saw the same data, and nobody else's gradients"
        assert not any("Pods share the network" in line for line in up.lines)
        assert len(list((user.folder / "code" / "listening").iterdir())) == PODS, "all listened at the same moment"
    finally:
        assert up.end() == 0, up.lines
