"""A client that knows ClusterD from its reference alone: who may join, what strangers are told, several listeners."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from evertrain.clusterd.effects import Carrier
from evertrain.clusterd.services import replies
from evertrain.kube.port import POD_GROUP
from tests.clusterd.client import Signal
from tests.clusterd.running import PATIENCE, Running, Training, running
from tests.operator.cluster import until

NOBODY = "00000000-1111-2222-3333-444444444444"


async def test_joining_any_number_of_times(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        client = clusterd.client(training.uid)
        assert await client.register() == (408, f"jobId={training.uid} not inited")
        for _ in range(3):
            assert await client.init() == (0, f"job(uid={training.uid}) init success")
        for _ in range(3):
            assert await client.register() == (0, "register success")
        another = clusterd.client(training.uid)
        assert await another.init() == (0, f"job(uid={training.uid}) init success")
        assert await another.register() == (0, "register success")
        assert (await training.group_now())["metadata"]["labels"]["process-recover-enable"] == "on"


async def test_all_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        clients = [clusterd.client(training.uid) for _ in range(8)]
        assert set(await asyncio.gather(*(client.init() for client in clients))) == {
            (0, f"job(uid={training.uid}) init success")
        }
        assert set(await asyncio.gather(*(client.register() for client in clients))) == {(0, "register success")}


async def test_a_job_that_is_not_there(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        for job in (NOBODY, "", "../x", "x" * 10_000):
            client = clusterd.client(job)
            code, info = await client.init()
            assert code == 502 and info
            assert (await client.register())[0] == 408


async def test_a_job_without_process_recovery(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train(strategies="")
        client = clusterd.client(training.uid)
        assert (await client.init())[0] == 403
        assert (await client.register())[0] == 408


async def test_hot_switching_is_enough_to_join(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train(strategies="", labels={"subHealthyStrategy": "hotSwitch"})
        await training.join()
        assert (await training.group_now())["metadata"]["labels"]["process-recover-enable"] == "on"


async def paused(clusterd: Running, training: Training) -> None:
    """As after a recovery that was left: who registers has to write the PodGroup."""
    await training.kube.patch(
        POD_GROUP, training.group, "default", {"metadata": {"labels": {"process-recover-enable": "pause"}}}
    )

    async def seen() -> bool:
        job = clusterd.clusterd.hub.job(training.uid)
        return job is not None and job.labels.get("process-recover-enable") == "pause"

    await until(seen, PATIENCE)


async def test_more_jobs_than_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert replies.MOST_JOBS == 10_000
    monkeypatch.setattr(replies, "MOST_JOBS", 1)
    async with running(tmp_path) as clusterd:
        first, second = await clusterd.train("first"), await clusterd.train("second")
        await first.join()
        client = clusterd.client(second.uid)
        assert (await client.init())[0] == 0
        assert await client.register() == (500, f"jobId={second.uid} out of max serve jobs 1")


async def test_the_last_place_goes_to_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ask while there is still a place for one; who asks twice is not one more."""
    monkeypatch.setattr(replies, "MOST_JOBS", 1)
    asked: list[None] = []
    all_ask = asyncio.Event()

    async def patch_group(*_: object) -> None:
        asked.append(None)
        if len(asked) == 4:
            all_ask.set()
        await all_ask.wait()

    monkeypatch.setattr(Carrier, "patch_group", patch_group)
    async with running(tmp_path) as clusterd:
        trainings = [await clusterd.train(name) for name in ("a", "b")]
        for training in trainings:
            await paused(clusterd, training)
        clients = [clusterd.client(training.uid) for training in trainings for _ in range(2)]
        for client in clients:
            assert (await client.init())[0] == 0
        codes = [code for code, _ in await asyncio.gather(*(client.register() for client in clients))]
        assert codes in ([0, 0, 500, 500], [500, 500, 0, 0])


async def test_a_group_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        await paused(clusterd, training)
        client = clusterd.client(training.uid)
        assert (await client.init())[0] == 0

        async def refused(*_: object) -> None:
            raise ConnectionError("the API server is away")

        monkeypatch.setattr(Carrier, "patch_group", refused)
        code, info = await client.register()
        assert code == 502 and "the API server is away" in info


@pytest.mark.parametrize("there", [False, True])
async def test_who_has_not_registered(tmp_path: Path, there: bool) -> None:
    async with running(tmp_path) as clusterd:
        uid = (await clusterd.train()).uid if there else NOBODY
        client = clusterd.client(uid)
        not_registered = (400, f"jobId={uid} not registed")
        assert await client.fault({0: 1}) == not_registered
        assert await client.stopped() == not_registered
        assert await client.can("recover") == not_registered
        assert await client.went("recover") == not_registered
        assert (await client.nics_switched(True))[0] == 400
        assert (await client.stress_tested({}))[0] in (400, 413)
        assert await client.health() == (0, f"jobId={uid}, receive HeathCheck")
        unknown, text = grpc.StatusCode.UNKNOWN, f"jobId={uid} not registed"
        assert await client.signals().error() == (unknown, text)
        me = {"jobId": uid, "role": "taskd"}
        wait = f"{text}, please wait agent register"
        assert await client.stream("Recover/SubscribeNotifySwitch", **me).error() == (unknown, wait)
        assert (await client.stream("Recover/SubscribeNotifyExecStressTest", **me).error())[0] == unknown
        assert await client.stream("Recover/SubscribeSwitchNicSignal", jobID=uid).error() == (unknown, text)
        assert (await client.stream("Recover/SubscribeStressTestResponse", jobID=uid).error())[0] == unknown
        missing = f"job:{uid} is not registered" if there else f"job:{uid} not exist"
        assert await client.switch_nics({"n": {"0": True}}) == (413, missing)
        assert await client.stress_test({"n": [0]}) == (413, missing)


async def test_of_two_listeners_the_newer_one_hears_and_the_other_is_told_to_go(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        first, older = await training.join()
        assert (await first.fault({2: 1}))[0] == 0
        begun = await older.next()
        assert begun == Signal("stopTrain", ("stop_train",), faults={"2": "1"})
        second = clusterd.client(training.uid)
        newer = second.signals()
        assert await older.next() is None, "its stream ends"
        again = await newer.next()
        assert again == begun and again.uuid != begun.uuid, "it knows nothing of what went before: all over again"
        assert (await first.stopped())[0] == 0, "reports are those of the job, whoever brings them"
        signal = await newer.next()
        assert signal is not None and signal.type == "globalFault" and signal.uuid == again.uuid


async def test_a_client_that_comes_back_hears_what_it_missed(tmp_path: Path) -> None:
    """Once it is decided, the last word is repeated as it was."""
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        training.let_go = False
        client, signals = await training.join()
        assert (await client.fault({2: 1}))[0] == 0
        await signals.next()
        await client.stopped()
        await signals.next()
        assert (await client.can("recover"))[0] == 0
        decided = await signals.next()
        assert decided is not None and decided.strategy == "recover"
        signals.cancel()
        again = client.signals()
        repeated = await again.next()
        assert repeated == decided and repeated.uuid == decided.uuid
        training.let_go = True
        before = await training.uids()
        await training.replaced(before, 1)
        assert (await client.went("recover"))[0] == 0
        await training.reported("recover-success")


async def test_keep_alives_come_while_nothing_else_does(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        _, signals = await training.join()
        with pytest.raises(TimeoutError):
            await signals.next(12.0)
        assert signals.keep_alives >= 1


async def test_reports_that_do_not_apply_change_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        client, signals = await training.join()
        for code in (0, 201, 404, 405, 406, 499, -1, 2**31 - 1):
            assert (await client.stopped(code))[0] == 0
            for strategy in ("retry", "recover", "dump", "exit", "downgrade", "upgrade", "continue", "migration", "?"):
                assert (await client.went(strategy, code))[0] == 0
        assert (await client.can("recover"))[0] == 0
        assert (await client.nics_switched(True))[0] == 0
        assert (await client.fault({2: 1}))[0] == 0
        assert await signals.next() == Signal("stopTrain", ("stop_train",), faults={"2": "1"})
        assert (await client.went("recover"))[0] == 0, "before anything was decided"
        assert (await client.can("recover"))[0] == 0
        assert (await client.stopped())[0] == 0
        signal = await signals.next()
        assert signal is not None and signal.type == "globalFault"
        assert len(signals.transcript) == 2


async def test_faults_of_ranks_that_are_not_there(tmp_path: Path) -> None:
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        client, signals = await training.join()
        for ranks in (
            [{"rankId": "99", "faultType": "1"}],
            [{"rankId": "x", "faultType": "1"}],
            [{"rankId": "-1"}],
            [],
        ):
            status = await client.call("Recover/ReportProcessFault", jobId=training.uid, faultRanks=ranks)
            assert isinstance(status.info, str)
        assert (await client.fault({2: 1}))[0] == 0
        signal = await signals.next()
        assert signal == Signal("stopTrain", ("stop_train",), faults={"2": "1"})


async def test_the_end_of_a_job_is_the_end_of_its_streams(tmp_path: Path) -> None:
    from evertrain.kube.port import ASCEND_JOB

    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        training.spares = 0
        client, signals = await training.join()
        assert (await client.fault({2: 1}))[0] == 0
        await signals.next()
        await training.kube.delete(ASCEND_JOB, training.name, "default")
        assert await signals.next() is None
        assert (await client.fault({2: 1}))[0] == 400
