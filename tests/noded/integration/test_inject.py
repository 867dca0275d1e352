"""`evertrain inject` on an embedded cluster: what it says, and what virtual nodes publish then."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from evertrain import aio
from evertrain.cli.main import main
from evertrain.embedded.cluster import Cluster, Settings
from evertrain.kube.cache import Cache
from evertrain.kube.client import Client
from evertrain.kube.port import CONFIG_MAP
from evertrain.noded import injected
from evertrain.wire import faultinfo

PATIENCE = 120.0
SETTINGS: dict[str, Any] = {"nodes": 2, "npus": 4, "operator": False, "clusterd": ""}


class Running:
    def __init__(self, kubeconfig: Path, kube: Client) -> None:
        self.kubeconfig, self.kube = kubeconfig, kube
        self.maps = Cache(kube, CONFIG_MAP)

    def device(self, node: str) -> faultinfo.DeviceInfo:
        item = self.maps.get(f"mindx-dl-deviceinfo-{node}", "kube-system") or {"data": {}}
        return faultinfo.decode_device(item["data"].get("DeviceInfoCfg", ""))

    def info(self, node: str) -> faultinfo.NodeInfo | None:
        item = self.maps.get(f"mindx-dl-nodeinfo-{node}", "mindx-dl")
        return faultinfo.decode_node(item["data"]["NodeInfo"]) if item else None

    def data(self, node: str) -> dict[str, str]:
        return (self.maps.get(f"mindx-dl-deviceinfo-{node}", "kube-system") or {}).get("data") or {}

    async def until(self, condition: Callable[[], Any]) -> None:
        def met() -> bool:
            with contextlib.suppress(faultinfo.BadInfo, KeyError):
                return bool(condition())
            return False

        assert await self.maps.until(met, PATIENCE), [item for item in self.maps]

    async def cli(self, *words: str, code: int = 0) -> str:
        """What the command prints: its messages if it is to fail. In a thread, for a process takes long to start."""
        output, messages = io.StringIO(), io.StringIO()

        def run() -> object:
            try:
                return main(words)
            except SystemExit as ended:  # argparse
                return ended.code

        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(messages):
            found = await asyncio.to_thread(run)
        assert found == code, (words, output.getvalue(), messages.getvalue())
        return (messages if code else output).getvalue()

    async def inject(self, *words: str, code: int = 0) -> str:
        return await self.cli("inject", *words, "--kubeconfig", str(self.kubeconfig), code=code)


@contextlib.asynccontextmanager
async def cluster(folder: Path, **settings: Any) -> AsyncIterator[Running]:
    async with Cluster(Settings(folder, **{**SETTINGS, **settings})) as started:
        kube = Client.from_kubeconfig(started.kubeconfig)
        running = Running(started.kubeconfig, kube)
        watching = asyncio.create_task(running.maps.run())
        try:
            await running.maps.synced.wait()
            yield running
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await kube.close()


async def test_faults_are_injected_and_cleared(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        assert await running.inject("list") == "Nothing is injected.\n"
        said = await running.inject("chip", "0x80e01801", "--node", "node-1", "--chip", "3")
        assert said == (
            "node-1 chip 3: 80E01801 injected, level RestartBusiness; ManuallySeparateNPU if it comes 2 times in 24 h\n"
        )
        await running.until(lambda: running.device("node-1").unhealthy == ("Ascend910-3",))
        assert running.device("node-0").unhealthy == ()
        said = await running.inject("node", "2C000031", "--node", "node-1", "--device", "Memory", "--id", "7")
        assert said == "node-1 Memory 7: 2C000031 injected, level SeparateFault\n"
        await running.until(lambda: running.info("node-1"))
        assert running.info("node-1") == faultinfo.NodeInfo(
            (faultinfo.NodeFault("Memory", 7, ("2C000031",), "SeparateFault"),), "UnHealthy"
        )
        await running.inject("switch", "[0x08520003,na,npu,na]", "--node", "node-0", "--node", "node-1", "--port", "5")
        for node in ("node-0", "node-1"):
            await running.until(lambda node=node: "SwitchInfoCfg" in running.data(node))
            assert faultinfo.decode_switch(running.data(node)["SwitchInfoCfg"]).faults[0].port == 5
        listed = (await running.inject("list", "--node", "node-1")).splitlines()
        assert [re.split(r"  +", line)[:5] for line in listed] == [
            ["NODE", "KIND", "WHERE", "CODE", "LEVEL"],
            ["node-1", "chip", "chip 3", "80E01801", "RestartBusiness"],
            ["node-1", "node", "Memory 7", "2C000031", "SeparateFault"],
            ["node-1", "switch", "chip 0 port 5", "[0x08520003,na,npu,na]", "Separate"],
        ]
        said = await running.inject("chip", "80E01801", "--node", "node-1", "--chip", "3", "--clear")
        assert said == "node-1 chip 3: 80E01801 cleared\n"
        await running.until(lambda: len(running.device("node-1").available) == 4)
        assert len((await running.inject("clear")).splitlines()) == 3
        assert await running.inject("list") == "Nothing is injected.\n"
        await running.until(lambda: running.info("node-1") is None and "SwitchInfoCfg" not in running.data("node-0"))
        assert await running.inject("clear") == "Nothing was injected.\n"


async def test_the_short_words(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        await running.inject("link-down", "--node", "node-0")
        await running.until(lambda: len(running.device("node-0").faults) == 4)
        assert {(f.code, f.level, f.kind) for f in running.device("node-0").faults} == {
            ("81078603", "NotHandleFault", "CardNetworkUnhealthy")
        }
        await running.inject("link-down", "--node", "node-0", "--clear")
        await running.inject("sub-health", "--node", "node-0", "--chip", "1-2,0")
        await running.until(lambda: len(running.device("node-0").faults) == 3)
        faults = running.device("node-0").faults
        assert [(f.chip, f.level) for f in faults] == [(f"Ascend910-{n}", "SubHealthFault") for n in range(3)]
        assert len(running.device("node-0").available) == 4


async def test_a_fault_for_a_while_and_one_with_a_level_of_its_own(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        said = await running.inject("node", "12345678", "--node", "node-0", "--level", "PreSeparateFault", "--for", "5")
        assert said == "node-0 CPU 0: 12345678 injected, level PreSeparateFault, as given\n"
        async with aio.timeout(PATIENCE):
            while await running.inject("list") != "Nothing is injected.\n":
                await asyncio.sleep(0.1)
        await running.until(lambda: running.info("node-0") is None)
        said = await running.inject("chip", "99999999", "--node", "node-0", "--chip", "0")
        assert said == "node-0 chip 0: 99999999 injected, level SeparateNPU, as every code that is in no list\n"


async def test_a_chip_that_rules_keep_away_is_released_by_clear(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        fault = ["chip", "80E01801", "--node", "node-0", "--chip", "1"]
        await running.inject(*fault)
        await running.inject(*fault, "--clear")
        said = await running.inject(*fault)
        assert said == "node-0 chip 1: 80E01801 injected, now ManuallySeparateNPU, for it came too often\n"
        await running.until(lambda: running.data("node-0")["ManuallySeparateNPU"] == "Ascend910-1")
        assert (await running.inject("clear")).splitlines() == [
            "node-0 chip 1: 80E01801 cleared",
            "node-0: Ascend910-1 may be used again",
        ]
        await running.until(lambda: len(running.device("node-0").available) == 4)


async def test_public_faults_are_told_as_others_tell_them(tmp_path: Path) -> None:
    def body() -> Any:
        (item,) = [item for item in running.maps if item["metadata"]["name"].startswith("injected-public-")]
        assert item["metadata"]["labels"]["mc-consumer-publicfault"] == "true"
        return json.loads(item["data"]["PublicFault"])

    async with cluster(tmp_path) as running:
        words = ["public", "210001007", "--node", "node-1", "--chip", "0,2-3"]
        assert "public fault 210001007 reported, level SubHealthFault" in await running.inject(*words)
        await running.until(lambda: [item for item in running.maps if "public" in item["metadata"]["name"]])
        (fault,) = body()["faults"]
        assert (body()["version"], body()["resource"]) == ("1.0", "CCAE")
        assert re.fullmatch(r"[a-zA-Z0-9\-_.]{8,128}", fault["faultId"]) and re.fullmatch(
            r"[\w.-]{8,128}", body()["id"]
        )
        assert (fault["faultType"], fault["faultCode"], fault["assertion"]) == ("Network", "210001007", "occur")
        assert fault["influence"] == [{"nodeName": "node-1", "deviceIds": [0, 2, 3]}]
        assert len(str(fault["faultTime"])) == len(str(body()["timestamp"])) == 13
        assert "public" in await running.inject("list")
        assert "is over" in await running.inject(*words, "--clear")
        await running.until(lambda: body()["faults"][0]["assertion"] == "recover")
        assert body()["faults"][0]["faultId"] == fault["faultId"]
        assert await running.inject("list") == "Nothing is injected.\n"
        assert "no such fault is injected" in await running.inject(*words, "--clear", code=1)


async def test_bad_input_is_explained(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        for words, message in [
            (["chip", "80E01801", "--node", "node-9"], "there is no node node-9; there are node-0, node-1"),
            (["chip", "80E01801", "--node", "node-0", "--chip", "4"], "the node has no chip 4; its chips are 0-3"),
            (["chip", "80E0", "--node", "node-0"], "code '80E0' is not 8 or 9 hexadecimal digits"),
            (["chip", "80E01801", "--node", "node-0", "--chip", "x"], "'x' is not a number"),
            (["chip", "80E01801", "--node", "node-0", "--level", "Bad"], "level 'Bad' is none of NotHandleFault"),
            (["chip", "80E01801", "--node", "node-0", "--for", "0"], "'0' is not a number of seconds above 0"),
            (["node", "12345678", "--node", "node-0"], "code 12345678 is in no list of node faults"),
            (["node", "0000001D", "--node", "node-0", "--device", "a b"], "device 'a b' is not a word"),
            (["switch", "08520003", "--node", "node-0"], "is not of the form [0x08520003,na,npu,na]"),
            (["public", "999999999", "--node", "node-0"], "'999999999' is no code of a public fault"),
            (["public", "010001001", "--node", "node-0", "--resource", "me"], "--resource is one of CCAE"),
            (["chip", "80E01801"], "the following arguments are required: --node"),
            (["telepathy"], "invalid choice: 'telepathy'"),
        ]:
            said = await running.inject(*words, code=2)
            assert message in said and "Traceback" not in said
        said = await running.inject("chip", "80E01801", "--node", "node-0", "--clear", code=1)
        assert "no such fault is injected on node-0" in said
        assert "no such fault" not in await running.inject("clear")
        assert not [item for item in running.maps if item["metadata"]["name"].startswith(injected.PREFIX)]


async def test_a_node_that_is_off_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path) as running:
        await running.until(lambda: running.device("node-1").available)
        await running.cli("node", "stop", "node-1", "--kubeconfig", str(running.kubeconfig))
        with monkeypatch.context() as patched:
            patched.setattr("evertrain.cli.injecting.PATIENCE", 1.0)
            said = await running.inject("chip", "A8028801", "--node", "node-1", "--chip", "0", code=1)
        assert "noded of node-1 has not published it" in said and "evertrain node list" in said
        assert not running.device("node-1").faults
        await running.inject("chip", "A8028801", "--node", "node-0", "--chip", "0")
        await running.cli("node", "start", "node-1", "--kubeconfig", str(running.kubeconfig))
        await running.until(lambda: running.device("node-1").unhealthy == ("Ascend910-0",))


async def test_faults_are_there_again_when_the_cluster_is(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        await running.inject("chip", "A8028801", "--node", "node-1", "--chip", "0")
        await running.until(lambda: running.device("node-1").faults)
        since = running.device("node-1").faults[0].time_ms
    async with cluster(tmp_path) as running:
        await running.until(lambda: running.device("node-1").faults)
        assert running.device("node-1").faults[0].time_ms == since


async def test_fifty_nodes_that_have_nothing_to_say_cost_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=50) as running:
        await running.until(lambda: all(running.device(f"node-{n}").available for n in range(50)))
        versions = [device_versions(running)]
        await asyncio.sleep(5.0)
        assert versions == [device_versions(running)]


def device_versions(running: Running) -> dict[str, str]:
    found = {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in running.maps}
    return {name: version for name, version in found.items() if name.startswith(faultinfo.DEVICE_PREFIX)}


@pytest.mark.parametrize(
    "kind", [[], ["chip"], ["node"], ["switch"], ["link-down"], ["sub-health"], ["public"], ["list"], ["clear"]]
)
def test_help_needs_no_cluster(capsys: pytest.CaptureFixture[str], kind: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inject", *kind, "--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: evertrain inject") and "--kubeconfig" in said


async def test_the_command_itself(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "evertrain.cli", "inject", "chip", "A8028801", "--node", "node-0",
            env={**os.environ, "KUBECONFIG": str(running.kubeconfig)}, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0
        assert output.decode().splitlines() == [
            f"node-0 chip {n}: A8028801 injected, level SeparateNPU" for n in range(4)
        ]
        await running.until(lambda: len(running.device("node-0").unhealthy) == 4)
