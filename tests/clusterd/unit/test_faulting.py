"""What is said to the fault centre and nobody would say again is kept before it is acknowledged."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from evertrain import aio
from evertrain.clusterd import faulting
from evertrain.clusterd.faulting import Faults
from evertrain.clusterd.faults import public
from evertrain.clusterd.faults.centre import FaultCentre
from evertrain.clusterd.observe import SYSTEM, Observer
from evertrain.kube.port import CONFIG_MAP, ApiError, Kind
from tests import virtual_time
from tests.kube.fake import FakeKube


def message(number: int) -> dict[str, object]:
    now = int(time.time() * 1000)
    fault = {
        "faultId": f"fault-{number:08}",
        "faultType": "NPU",
        "faultCode": "220001001",
        "faultTime": now,
        "assertion": "occur",
        "faultLocation": {},
        "influence": [{"nodeName": "node-1", "deviceIds": [0]}],
        "description": "",
    }
    return {"id": f"message-{number}", "timestamp": now, "version": "1.0", "resource": "fd-online", "faults": [fault]}


async def test_a_public_fault_that_was_taken_survives():
    kube = FakeKube()
    first = Faults(kube, FaultCentre(), Observer(kube))
    await first.start()
    running = asyncio.ensure_future(first.run())
    try:
        async with aio.timeout(60):
            wrong = await asyncio.gather(*(first.public_fault(message(number)) for number in range(20)))
            assert wrong == [""] * 20
            refused = 3

            def before(verb: str, kind: Kind, name: str) -> None:
                nonlocal refused
                if verb == "replace" and name == "clusterd-fault-memory" and refused:
                    refused -= 1
                    raise ApiError(503, "ServiceUnavailable", "away")

            kube.before = before
            assert await first.public_fault(message(20)) == ""
            assert not refused
            assert await first.public_fault({}) != ""
    finally:
        running.cancel()  # as a kill would
        await asyncio.gather(running, return_exceptions=True)
    kube.before = lambda verb, kind, name: None
    centre = FaultCentre()
    second = Faults(kube, centre, Observer(kube))
    await second.remember()
    await second.start()
    assert '"publicFaultNum":21' in centre.process(int(time.time() * 1000)).statistics["FaultNum"]
    assert [item["metadata"]["name"] for item in kube.items(CONFIG_MAP)].count("clusterd-fault-memory") == 1


async def test_too_many_public_faults_do_not_cost_the_rest_its_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(faulting, "MEMORY_LARGEST", 512)
    kube = FakeKube()
    faults = Faults(kube, FaultCentre(), Observer(kube))
    await faults.start()
    running = asyncio.ensure_future(faults.run())
    try:
        async with aio.timeout(60):
            await asyncio.gather(*(faults.public_fault(message(number)) for number in range(100)))
            assert "have to be sent again" in caplog.text
            faults.expose(["a pod"])  # only now: what was kept while all could be kept does not know it
            assert await faults.public_fault(message(100)) == ""
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    centre = FaultCentre()
    await Faults(kube, centre, Observer(kube)).remember()
    assert centre._pipeline.exposed == {"a pod"}


async def test_what_administrators_put_beside_it_counts_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "publicCustomization.json"
    monkeypatch.setattr(faulting, "PUBLIC_CODES", (file,))
    monkeypatch.setattr(faulting, "KEEP_EVERY", 0.01)
    kube = FakeKube()
    faults = Faults(kube, FaultCentre(), Observer(kube))
    await faults.start()
    shipped = faults.public_resources()
    running = asyncio.ensure_future(faults.run())
    try:
        async with aio.timeout(60):
            file.write_text('{"publicFaultCode":{"SubHealthFaultCodes":["123456789"]},"publicFaultResource":["mine"]}')
            while faults.public_resources() != {"mine"}:
                await asyncio.sleep(0.01)
            file.unlink()
            while faults.public_resources() != shipped:
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_config_maps_of_public_faults_that_are_gone_are_forgotten():
    kube, centre = FakeKube(), FaultCentre()
    observer = Observer(kube)
    faults = Faults(kube, centre, observer)
    for name in ("one", "two"):
        metadata = {"name": name, "namespace": "default", "labels": {public.LABEL: "true"}}
        await kube.create(CONFIG_MAP, {"metadata": metadata, "data": {public.DATA_KEY: json.dumps(message(1))}})
    watching = asyncio.ensure_future(observer.public.run())
    try:
        async with aio.timeout(60):
            await observer.public.synced.wait()
            await faults.start()
            assert set(centre._pipeline.public.state.texts) == {"default/one", "default/two"}
            kube.remove(CONFIG_MAP, "one")
            while observer.public.get("one", "default") is not None:
                await asyncio.sleep(0)
            assert set(centre._pipeline.public.state.texts) == {"default/two"}
        again = FaultCentre()
        again.load(centre.dump())
        await Faults(kube, again, Observer(kube)).start()  # it has gone, too, while nobody was here
        assert not again._pipeline.public.state.texts
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def test_a_clock_that_is_set_makes_no_fault_longer_or_shorter():
    """It is read again whenever something happens, and what waits does so by the clock that nobody sets."""

    async def run() -> None:
        kube, centre, loop = FakeKube(), FaultCentre(), asyncio.get_running_loop()
        wall = int(time.time()) - loop.time()
        faults = Faults(kube, centre, Observer(kube), clock=lambda: wall + loop.time())
        await faults.start()
        running = asyncio.ensure_future(faults.run())
        try:
            once = message(1)
            once["faults"][0]["assertion"] = "once"  # type: ignore[index]
            for by in (-5000, 5000, 0):
                began = loop.time()
                assert await faults.public_fault(once) == ""
                (entry,) = centre._pipeline.public.state.nodes["node-1"].values()
                assert entry.added == pytest.approx((wall + began) * 1000, abs=10)
                wall += by
                while centre._pipeline.public.count:
                    await asyncio.sleep(0.1)
                assert loop.time() - began == pytest.approx(5, abs=0.2)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    virtual_time.run(run())


async def test_what_can_not_be_kept_once_is_kept_later_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(faulting, "KEEP_EVERY", 0.01)
    kube, centre = FakeKube(), FaultCentre()
    faults = Faults(kube, centre, Observer(kube))
    await faults.start()
    dump, defects = centre.dump, 3

    def poisoned(*, with_public: bool = True) -> bytes:
        nonlocal defects
        if defects:
            defects -= 1
            raise ValueError("poisoned")
        return dump(with_public=with_public)

    monkeypatch.setattr(centre, "dump", poisoned)
    running = asyncio.ensure_future(faults.run())
    try:
        async with aio.timeout(60):
            assert await faults.public_fault(message(1)) == ""
        assert not defects and "can't be kept" in caplog.text
        assert kube.find(CONFIG_MAP, "clusterd-fault-memory", SYSTEM)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
