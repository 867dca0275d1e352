"""noded against the embedded API server over HTTP: what is published when, restarts of either side, real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from evertrain import aio
from evertrain.embedded.api.server import ApiServer
from evertrain.embedded.certificates import credentials
from evertrain.kube.cache import Cache
from evertrain.kube.port import CONFIG_MAP, EVENT, NODE, POD, NotFound, Object
from evertrain.noded import codes, injected
from evertrain.noded.daemon import AUTO, NodeDaemon
from evertrain.noded.detectors.base import now_ms
from evertrain.noded.faults import AnyFault, ChipFault, NodeFault, SwitchFault
from evertrain.noded.sources import Sources
from evertrain.wire import faultinfo
from tests.operator.cluster import Cluster, background, cluster

PATIENCE = 120.0
DEVICE, INFO = ("mindx-dl-deviceinfo-node-0", "kube-system"), ("mindx-dl-nodeinfo-node-0", "mindx-dl")
NODE_0: Object = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-0"}}


class World:
    """A cluster with one node, seen by somebody who watches its ConfigMaps."""

    def __init__(self, running: Cluster) -> None:
        self.cluster = running
        self.kube = running.kube
        self.maps = Cache(self.kube, CONFIG_MAP)

    def data(self, place: tuple[str, str]) -> dict[str, str]:
        return (self.maps.get(*place) or {}).get("data") or {}

    @property
    def device(self) -> faultinfo.DeviceInfo:
        return faultinfo.decode_device(self.data(DEVICE)["DeviceInfoCfg"])

    @property
    def info(self) -> faultinfo.NodeInfo | None:
        text = self.data(INFO).get("NodeInfo")
        return faultinfo.decode_node(text) if text else None

    async def until(self, condition: Callable[[], Any]) -> None:
        def met() -> bool:
            with contextlib.suppress(KeyError, faultinfo.BadInfo):
                return bool(condition())
            return False

        assert await self.maps.until(met, PATIENCE), {key: self.data(key) for key in (DEVICE, INFO)}

    async def inject(self, *faults: AnyFault) -> None:
        item = injected.config_map("node-0", faults)
        try:
            await self.kube.replace(CONFIG_MAP, item)
        except NotFound:
            await self.kube.create(CONFIG_MAP, item)


@contextlib.asynccontextmanager
async def world(folder: Path, npus: int = 4) -> AsyncIterator[World]:
    async with cluster(folder) as running:
        await running.kube.create(NODE, NODE_0)
        resources = {"cpu": "4", "huawei.com/Ascend910": str(npus)}
        await running.kube.patch(NODE, "node-0", None, {"status": {"capacity": resources}}, status=True)
        found = World(running)
        async with background(found.maps.run):
            await found.maps.synced.wait()
            yield found


@contextlib.asynccontextmanager
async def noded(running: Cluster, **settings: Any) -> AsyncIterator[NodeDaemon]:
    kube = running.client()
    sources = Sources(kube, "node-0")
    daemon = NodeDaemon(kube, "node-0", sources, **{"gap": 0.05, **settings})
    try:
        async with background(sources.run, daemon.run):
            yield daemon
    finally:
        await kube.close()


class Scripted:
    """A detector that tells what it is told."""

    name = "scripted"

    def __init__(self) -> None:
        self.started = asyncio.Event()

    async def run(self, tell: Any) -> None:
        self._tell = tell
        self.started.set()
        await asyncio.Event().wait()

    async def tell(self, *faults: AnyFault) -> None:
        await asyncio.wait_for(self.started.wait(), PATIENCE)
        self._tell(faults)


def chip(number: int, code: str = "80E01801", **fields: Any) -> ChipFault:
    return ChipFault(code=code, chip=number, **{"since_ms": now_ms(), **fields})


def cpu(code: str = "0000001D", **fields: Any) -> NodeFault:
    return NodeFault(code=code, device="CPU", id=1, since_ms=now_ms(), **fields)


async def test_faults_of_chips_and_node_are_published_and_taken_back(tmp_path: Path) -> None:
    async with world(tmp_path) as seen, noded(seen.cluster):
        await seen.until(lambda: len(seen.device.available) == 4)
        assert seen.info is None, "there is none while nothing is wrong"
        assert (seen.maps.get(*DEVICE) or {})["metadata"]["labels"]["mx-consumer-cim"] == "true"
        one = chip(1)
        await seen.inject(
            one, chip(2, "81078603"), cpu(), SwitchFault(code="[0x08520003,na,npu,na]", since_ms=now_ms())
        )
        await seen.until(lambda: seen.device.faults and seen.info and "SwitchInfoCfg" in seen.data(DEVICE))
        assert seen.device.unhealthy == ("Ascend910-1",)
        assert seen.device.available == ("Ascend910-0", "Ascend910-2", "Ascend910-3")
        assert [(f.chip, f.code, f.level, f.kind) for f in seen.device.faults] == [
            ("Ascend910-1", "80E01801", "RestartBusiness", "CardUnhealthy"),
            ("Ascend910-2", "81078603", "NotHandleFault", "CardNetworkUnhealthy"),
        ]
        assert seen.device.faults[0].time_ms == one.since_ms
        assert seen.info == faultinfo.NodeInfo(
            (faultinfo.NodeFault("CPU", 1, ("0000001D",), "PreSeparateFault"),), "PreSeparate"
        )
        assert seen.data(INFO)["updateTime"].endswith("Z")
        switch = faultinfo.decode_switch(seen.data(DEVICE)["SwitchInfoCfg"])
        assert (switch.level, switch.status, len(switch.faults)) == ("Separate", "UnHealthy", 1)
        await seen.inject()
        await seen.until(lambda: not seen.device.faults and seen.info is None)
        await seen.until(lambda: "SwitchInfoCfg" not in seen.data(DEVICE))
        assert len(seen.device.available) == 4

        async def told() -> set[tuple[str, str]]:
            events = (await seen.kube.list(EVENT, "kube-system")).items
            return {(event["reason"], event["action"]) for event in events if event["type"] == "Warning"}

        expected = {("Occur", "RestartBusiness"), ("Recovery", "RestartBusiness"), ("Occur", "PreSeparateFault")}
        async with aio.timeout(PATIENCE):
            while not expected <= await told():
                await asyncio.sleep(0.02)


async def test_nothing_is_written_that_is_there_already(tmp_path: Path) -> None:
    async with world(tmp_path) as seen:
        faults = [chip(1), cpu()]
        await seen.inject(*faults)
        async with noded(seen.cluster):
            await seen.until(lambda: seen.device.faults and seen.info)
        before = [seen.maps.get(*place) for place in (DEVICE, INFO)]
        async with noded(seen.cluster) as second:
            # It has seen all that there is when it publishes something new.
            await seen.inject(*faults, NodeFault(code="2C000031", device="CPU", id=2, since_ms=now_ms()))
            await seen.until(lambda: seen.info and seen.info.status == "UnHealthy")
            assert second.device.writes == 0 and second.info.writes == 1
        after = [seen.maps.get(*place) for place in (DEVICE, INFO)]
        assert after[0] == before[0] and after[1] != before[1]


async def test_what_has_not_changed_is_written_again_after_its_time(tmp_path: Path) -> None:
    async with world(tmp_path) as seen, noded(seen.cluster, device_seconds=1.0):
        await seen.until(lambda: seen.device.update_time)
        first = seen.device.update_time
        await seen.until(lambda: seen.device.update_time > first)


async def test_chips_that_pods_have_are_not_free_and_leave_only_when_they_are(tmp_path: Path) -> None:
    async with world(tmp_path) as seen, noded(seen.cluster):
        pod: Object = {
            "metadata": {"name": "p", "namespace": "default", "annotations": {"huawei.com/Ascend910": "Ascend910-1"}},
            "spec": {"nodeName": "node-0", "containers": [{"name": "c", "image": "i"}]},
        }
        await seen.kube.create(POD, pod)
        await seen.until(lambda: seen.device.available == ("Ascend910-0", "Ascend910-2", "Ascend910-3"))
        await seen.inject(chip(1, "A8028801", level="PreSeparateNPU"))
        await seen.until(lambda: seen.device.faults)
        assert seen.device.unhealthy == ()
        await seen.kube.delete(POD, "p", "default", grace=0)
        await seen.until(lambda: seen.device.unhealthy == ("Ascend910-1",))


async def test_an_event_is_over_by_itself(tmp_path: Path) -> None:
    async with world(tmp_path) as seen, noded(seen.cluster):
        await seen.inject(cpu(until_ms=now_ms() + 10_000))
        await seen.until(lambda: seen.info)
        await seen.until(lambda: seen.info is None)


async def test_an_outage_of_the_api_server_loses_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as seen, noded(seen.cluster) as daemon:
        await seen.until(lambda: seen.device)
        port = seen.cluster.server.port
        await seen.cluster.server.stop()
        daemon.tell("links", [cpu()])
        daemon.tell("ascend", [chip(3)])
        await seen.inject(chip(1))  # in the server's own process; noded can't see it yet
        await asyncio.sleep(0.5)
        assert seen.info is None
        seen.cluster.server = ApiServer(seen.cluster.api, credentials(tmp_path / "keys"), port=port)
        await seen.cluster.server.start()
        await seen.until(lambda: seen.info and seen.device.unhealthy == ("Ascend910-1", "Ascend910-3"))


async def test_faults_that_come_often_keep_a_chip_away_until_somebody_clears_it(tmp_path: Path) -> None:
    """Counted over a restart of noded, in which a fault that goes on doesn't count again."""
    async with world(tmp_path) as seen:
        first, second, third = Scripted(), Scripted(), Scripted()
        async with noded(seen.cluster, detectors=[first]):
            await first.tell(chip(1))
            await seen.until(lambda: seen.device.faults)
            since = seen.device.faults[0].time_ms
        async with noded(seen.cluster, detectors=[second]):
            await second.tell(chip(1, since_ms=now_ms() + 5), cpu())
            await seen.until(lambda: seen.info)
            assert seen.device.faults[0].time_ms == since and seen.device.faults[0].level == "RestartBusiness"
            await second.tell()
            await seen.until(lambda: not seen.device.faults)
            await second.tell(chip(1))
            await seen.until(lambda: seen.data(DEVICE)["ManuallySeparateNPU"] == "Ascend910-1")
            assert [fault.level for fault in seen.device.faults] == ["ManuallySeparateNPU"]
            reasons = json.loads(seen.data(DEVICE)["UpgradeFaultReason"])["Ascend910-1"]
            assert [(each["fault_code"], each["upgrade_type"]) for each in reasons] == [("80E01801", "FaultFrequency")]
            await second.tell(cpu())
            await seen.until(lambda: [fault.code for fault in seen.device.faults] == ["ManuallySeparateNPU"])
            await seen.until(lambda: seen.info)
            assert seen.device.unhealthy == ("Ascend910-1",)
        async with noded(seen.cluster, detectors=[third]):
            await third.tell()
            await seen.until(lambda: seen.info is None)
            assert seen.device.unhealthy == ("Ascend910-1",), "also after another restart"
            await seen.kube.patch(CONFIG_MAP, *DEVICE, {"data": {"ManuallySeparateNPU": ""}})
            await seen.until(lambda: not seen.device.faults and len(seen.device.available) == 4)
            assert seen.data(DEVICE)["UpgradeFaultReason"] == ""


async def test_levels_are_those_of_the_configuration(tmp_path: Path) -> None:
    async with world(tmp_path) as seen, noded(seen.cluster):
        await seen.inject(chip(1), cpu())
        await seen.until(lambda: seen.device.faults and seen.info)

        async def configure(name: str, namespace: str, file: str, content: Any) -> None:
            metadata = {"name": name, "namespace": namespace}
            item = {"metadata": metadata, "data": {file: content if isinstance(content, str) else json.dumps(content)}}
            await seen.kube.create(CONFIG_MAP, item)

        await configure("mindx-dl-fault-config", "kube-system", "faultCode.json", {"SubHealthFaultCodes": ["80E01801"]})
        await seen.until(lambda: seen.device.faults[0].level == "SubHealthFault")
        config = {"FaultTypeCode": {"SeparateFaultCodes": ["0000001D"]}}
        await configure("mindx-dl-node-fault-config", "mindx-dl", "NodeDConfiguration.json", config)
        await seen.until(lambda: seen.info and seen.info.status == "UnHealthy")
        await seen.kube.patch(
            CONFIG_MAP, "mindx-dl-node-fault-config", "mindx-dl", {"data": {"NodeDConfiguration.json": "{"}}
        )
        await seen.until(lambda: seen.info and seen.info.status == "PreSeparate")


async def test_the_chips_are_left_to_a_device_plugin(tmp_path: Path) -> None:
    async with world(tmp_path) as seen:
        name, namespace = DEVICE
        theirs = {"metadata": {"name": name, "namespace": namespace}, "data": {"DeviceInfoCfg": "theirs"}}
        await seen.kube.create(CONFIG_MAP, theirs)
        async with noded(seen.cluster, device_info=AUTO):
            await seen.inject(chip(1), cpu())
            await seen.until(lambda: seen.info)
            assert seen.data(DEVICE) == {"DeviceInfoCfg": "theirs"}
            await seen.kube.delete(CONFIG_MAP, name, namespace)
            await seen.until(lambda: seen.device.faults)


async def test_nonsense_in_the_api_does_no_harm(tmp_path: Path) -> None:
    async with world(tmp_path) as seen:
        metadata = {
            "name": DEVICE[0],
            "namespace": DEVICE[1],
            "labels": {"app.kubernetes.io/managed-by": "evertrain-noded"},
        }
        nonsense = {"annotations": {"evertrain.dev/noded-state": '{"version": 7}'}}
        await seen.kube.create(
            CONFIG_MAP, {"metadata": metadata | nonsense, "data": {"ManuallySeparateNPU": "x,,Ascend910-9"}}
        )
        item = injected.config_map("node-0", [chip(1)])
        item["data"]["faults"] = '[{"kind": "chip"}, 7, ' + item["data"]["faults"][1:]
        await seen.kube.create(CONFIG_MAP, item)
        async with noded(seen.cluster):
            await seen.until(lambda: seen.device.unhealthy == ("Ascend910-1",))
            await seen.kube.patch(CONFIG_MAP, item["metadata"]["name"], "mindx-dl", {"data": {"faults": "junk"}})
            await seen.until(lambda: not seen.device.unhealthy)
            await seen.kube.delete(NODE, "node-0")
            await seen.until(lambda: seen.maps.get(*DEVICE) is None)
            await seen.inject(chip(2))
            await seen.kube.create(NODE, NODE_0)
            await seen.until(lambda: seen.device.unhealthy == ("Ascend910-2",))


async def test_a_detector_that_fails_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evertrain.noded.daemon.FIRST_DELAY", 0.01)

    class Shaky:
        name = "shaky"
        runs = 0

        async def run(self, tell: Any) -> None:
            self.runs += 1
            if self.runs == 1:
                raise RuntimeError("as it happens")
            tell([cpu()])
            await asyncio.Event().wait()

    async with world(tmp_path) as seen, noded(seen.cluster, detectors=[Shaky()]):
        await seen.until(lambda: seen.info)


# --- the process

OWN = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
ENTER = ["nsenter", "--mount", *([] if os.geteuid() == 0 else ["--user", "--preserve-credentials"])]


def possible() -> bool:
    found = all(shutil.which(tool) for tool in ("unshare", "mount", "nsenter"))
    trial = ["unshare", *OWN, "--mount", "mount", "-t", "tmpfs", "none", "/tmp"]
    return found and subprocess.run(trial, capture_output=True).returncode == 0


def command(seen: World, *options: str) -> list[str]:
    seen.cluster.client()  # writes the kubeconfig
    kubeconfig = seen.cluster.folder / f"kubeconfig-{seen.cluster.server.port}"
    return [sys.executable, "-m", "evertrain.noded", "--node-name", "node-0", "--kubeconfig", str(kubeconfig), *options]


@contextlib.asynccontextmanager
async def process(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        _, messages = await started.communicate()
        print(messages.decode())


@pytest.mark.parametrize("own", [OWN] if possible() else [])
async def test_a_read_only_file_system_makes_a_real_node_unhealthy(tmp_path: Path, own: list[str]) -> None:
    """From the kernel to the ConfigMap and back, by the real process; and Ctrl-C ends it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    async with world(tmp_path) as seen:
        options = ["--detectors", "storage,clock,pressure", "--mounts", str(disk)]
        script = f"mount -t tmpfs none {disk} && exec " + " ".join(command(seen, *options))
        async with process("unshare", *own, "--mount", "sh", "-c", script) as running:
            await seen.until(lambda: len(seen.device.available) == 4)
            for mode in ("ro", "rw"):
                remount = [*ENTER, "--target", str(running.pid), "mount", "-o", f"remount,{mode}", str(disk)]
                await (await asyncio.create_subprocess_exec(*remount)).wait()
                if mode == "rw":
                    await seen.until(lambda: seen.info is None)
                else:
                    await seen.until(lambda: seen.info)
                    assert seen.info is not None and seen.info.status == "UnHealthy"
                    assert seen.info.faults[0].codes == (codes.READ_ONLY,)
            running.send_signal(signal.SIGTERM)
            async with aio.timeout(PATIENCE):
                assert await running.wait() == 0


async def test_a_drop_in_program_on_a_real_node(tmp_path: Path) -> None:
    folder = tmp_path / "noded.d"
    folder.mkdir()
    line = '{"kind": "chip", "code": "A8028801", "chip": 2}'
    (folder / "probe").write_text(f"#!/bin/sh\necho '{line}'\nexec cat\n")
    (folder / "probe").chmod(0o755)
    async with world(tmp_path) as seen:
        async with process(*command(seen, "--detectors", "programs", "--programs", str(folder))) as running:
            await seen.until(lambda: seen.device.unhealthy == ("Ascend910-2",))
            running.send_signal(signal.SIGINT)
            async with aio.timeout(PATIENCE):
                assert await running.wait() == 0
        assert seen.device.unhealthy == ("Ascend910-2",), "that it ended is no reason to trust the chip"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kubeconfig", "/nowhere/kubeconfig"], "is not a usable kubeconfig"),
        (["--detectors", "links,telepathy"], "there is no detector 'telepathy'; there are links, memory"),
        (["--kubeconfig", os.devnull, "--config", "/nowhere/config"], "/nowhere/config can't be read"),
    ],
)
def test_what_keeps_it_from_starting_is_said(options: list[str], message: str) -> None:
    words = [sys.executable, "-m", "evertrain.noded", "--node-name", "node-0", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
