"""Whatever is published about nodes, faults and recoveries, and whatever clients say: ClusterD neither breaks nor stops
working, and begins again with whatever it finds.

6 000 texts through the fault centre as part of the tests, always the same; a tenth of EVERTRAIN_FUZZ_FRAMES (100 000
with `make fuzz`), always new ones, if that asks for more. A whole ClusterD is given 300 texts, finds 120 at its starts,
and is asked 300 things; together as many as go through the fault centre if there are more. Its services alone are sent
2 000 damaged requests, and 100 000, by tests/clusterd/integration/test_services_damaged.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from evertrain import aio
from evertrain.clusterd import keep, pages, traces
from evertrain.clusterd.faults import outputs
from evertrain.clusterd.faults.centre import FaultCentre
from evertrain.clusterd.faults.outputs import ClusterInfo
from evertrain.clusterd.jobs.globaltable import BadTable, assemble, read_table
from evertrain.clusterd.resched import reasons
from evertrain.clusterd.services import faultmsg
from evertrain.faultcodes import overrides
from evertrain.faultcodes.table import shipped
from evertrain.kube.port import CONFIG_MAP, ApiError, Kube, NotFound
from evertrain.noded import injected
from evertrain.noded.faults import decode as decode_fault
from evertrain.noded.faults import encode as encode_fault
from evertrain.noded.tables import tables
from evertrain.wire import faultinfo
from tests.clusterd.client import Client
from tests.clusterd.faultworld import START, World, chip, device_data, make_job
from tests.clusterd.running import Running, Training, leading, running
from tests.fuzz.answers import Known, documented, is_right
from tests.fuzz.published import CODES, NOW, PUBLIC, Damage
from tests.fuzz.requests import Requests
from tests.fuzz.targets import Growth
from tests.fuzz.test_frames import FRAMES as ASKED
from tests.fuzz.test_frames import MAX_GROWTH, SEED
from tests.operator.cluster import cluster

TEXTS = ASKED // 10 if ASKED > 20_000 else 6_000
OBJECTS = TEXTS // 20
"""That go through a whole ClusterD."""
ROUNDS, A_ROUND = max(3, TEXTS // 1000), 40
"""How often a ClusterD begins with what it finds, and how much of that is new."""
ASKED_OF_ALL = max(300, TEXTS - OBJECTS - ROUNDS * A_ROUND) if ASKED > 20_000 else 300
PATIENCE = 60.0

pytestmark = pytest.mark.timeout(300 + TEXTS // 50)


@pytest.fixture(autouse=True)
def _quiet(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    with capsys.disabled():
        print(f"\n  {TEXTS} texts, EVERTRAIN_FUZZ_SEED={SEED} ", end="", flush=True)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def publish(centre: FaultCentre, damage: Damage, now: int) -> None:
    pick = damage.random
    node = pick.choice(("n0", "n1", "n2", "n3", "x" * 300, ""))
    match pick.randrange(12):
        case 0 | 1 | 2 | 3:
            centre.device(node, damage.device() if pick.random() < 0.97 else None)
        case 4 | 5:
            centre.node(node, damage.node() if pick.random() < 0.95 else None)
        case 6:
            centre.public_config_map(pick.choice(("a/b", "c/d", "")), damage.public(), now)
        case 7:
            centre.public(damage.public_message(), now)
        case 8:
            centre.manual_policy(damage.policy() if pick.random() < 0.9 else None)
        case 9:
            centre.manual_listed(damage.listed() if pick.random() < 0.9 else None)
        case 10:
            centre.relation_rules(*damage.rules())
        case 11:
            codes, _ = overrides.public(shipped(), damage.public_codes())
            centre.set_codes(codes)


def test_whatever_is_published() -> None:
    """All that comes out of the centre can be written and sent, and in the end it works as a new one does."""
    damage, growth, world = Damage(SEED), Growth(TEXTS), World(make_job("a"), make_job("b", strategy="retry"))
    info = ClusterInfo()
    for number in range(TEXTS):
        publish(world.centre, damage, world.now)
        if damage.random.random() < 0.3:
            world.now += damage.random.choice((1, 50, 3_000, 61_000))
        if damage.random.random() < 0.02:
            world.centre.process_report("b", {damage.random.randrange(-1, 9): damage.random.choice("012x")}, world.now)
        result = world.look()
        for text in info.update(result, world.now).values():
            assert not text or json.loads(text) is not None
        for job, faults in result.changed.items():
            assert faultmsg.signal(job, faults.devices).SerializeToString()
        if number % 500 == 499:
            world.restart()
        growth.look(number)
    assert growth.megabytes() < MAX_GROWTH, f"seed {SEED}"
    works_again(world)


def works_again(world: World) -> None:
    """For the jobs that were there verdicts stand until their pods are replaced: that is no damage. So for others."""
    centre, nodes = world.centre, ("good-0", "good-1")
    centre.set_codes(shipped())
    centre.relation_rules("", "")
    centre.manual_policy(None)
    centre.manual_listed(None)
    for node in nodes:
        centre.device(node, device_data())
    world.job(make_job("good", nodes=nodes))
    world.at(world.now - START + 100_000)
    assert world.hit("good") == [] and world.health("good") == "Healthy", f"seed {SEED}"
    world.chips("good-1", chip(0, "80E18402", "SeparateNPU", world.now))
    assert world.hit("good") == [(2, "80E18402", "SeparateNPU", "1")], f"seed {SEED}"
    for node in ("n0", "n1", "n2", "n3", "x" * 300, ""):
        centre.node(node, None)
        centre.device(node, None)
    world.chips("good-1")
    assert world.hit("good") == [] and set(world.result.devices) >= set(nodes), f"seed {SEED}"


def test_what_has_the_wrong_check_code_changes_nothing() -> None:
    damage, world = Damage(SEED), World(make_job("a"))
    world.chips("n1", chip(0, "80E18402", "SeparateNPU"))
    before, told = dict(world.result.devices), {""}  # none at all is no text: the node has not begun
    for number in range(TEXTS // 10):
        text = damage.bytes(faultinfo.encode_device(damage.devices()))
        try:
            faultinfo.decode_device(text)
        except faultinfo.BadInfo:
            world.centre.device(("n0", "n1")[number % 2], {"DeviceInfoCfg": text})
            result = world.look()
            assert text in told or any("is ignored" in each for each in result.complaints), f"seed {SEED}: {text}"
            assert dict(result.devices) == before, f"seed {SEED}: {text}"
            told.add(text)


def test_rank_tables_of_services() -> None:
    damage = Damage(SEED)
    pod = {"metadata": {"name": "p"}, "status": {"phase": "Running", "hostIP": "1.1.1.1", "podIP": "2.2.2.2"}}
    made = 0
    for _ in range(TEXTS // 4):
        labels = {"jobID": "s", "grt-group/deploy-server": "1"}
        item = {"metadata": {"name": "rings-config-x", "labels": labels}, "data": {"hccl.json": damage.table()}}
        try:
            table = read_table(item)
        except BadTable:
            continue
        if table is not None:
            text = assemble([pod], [pod], [table])
            assert text and json.loads(text)["status"] == "completed"
            made += 1
    assert made


# A whole ClusterD.


async def put(kube: Kube, namespace: str, name: str, labels: Mapping[str, str], data: Mapping[str, str]) -> bool:
    """Whether the API server takes it."""
    try:
        try:
            await kube.patch(CONFIG_MAP, name, namespace, {"metadata": {"labels": labels}, "data": data})
        except NotFound:
            await kube.create(
                CONFIG_MAP, {"metadata": {"name": name, "namespace": namespace, "labels": labels}, "data": data}
            )
    except (ApiError, ValueError):
        return False
    return True


async def one(kube: Kube, damage: Damage, mine: str) -> bool:
    """Nodes of the job itself are only damaged in a way that nobody believes."""
    pick = damage.random
    news, node = {"mx-consumer-cim": "true"}, f"fuzz-{pick.randrange(20)}"
    match pick.randrange(8):
        case 0 | 1:
            return await put(kube, "kube-system", f"mindx-dl-deviceinfo-{node}", news, damage.device())
        case 2:
            return await put(kube, "mindx-dl", f"mindx-dl-nodeinfo-{node}", news, damage.node())
        case 3:
            labels = {"mc-consumer-publicfault": "true"}
            text = damage.public().replace('"n0"', f'"{node}"')
            return await put(kube, "default", f"public-{pick.randrange(5)}", labels, {"PublicFault": text})
        case 4:
            data = {"manually_separate_policy.conf": damage.policy()}
            return await put(kube, "cluster-system", "clusterd-config-cm", {}, data)
        case 5:
            text = damage.bytes(faultinfo.encode_device(damage.devices()))
            try:
                faultinfo.decode_device(text)
            except faultinfo.BadInfo:
                return await put(kube, "kube-system", f"mindx-dl-deviceinfo-{mine}", news, {"DeviceInfoCfg": text})
            return False
        case 6:
            labels = {**news, "jobID": "chat", "grt-group/deploy-server": "1"}
            return await put(kube, "default", "rings-config-chat", labels, {"hccl.json": damage.table()})
        case _:
            data = {key or "x": text for key, text in damage.listed().items()}
            return await put(kube, "cluster-system", "clusterd-manual-info-cm", {}, data)


async def say(client: Client, damage: Damage) -> None:
    """What a client says that means no harm but has it all wrong; the codes are those of the reference."""
    pick = damage.random
    match pick.randrange(4):
        case 0:
            rank = pick.choice(("-1", "99999", "x", "", "1.5", "9" * 400, "٣"))
            faults = [{"rankId": rank, "faultType": pick.choice("012x")}]
            answer = await client.call("Recover/ReportProcessFault", jobId=client.job, faultRanks=faults)
            assert answer.code == (0 if rank == "99999" else 409), answer
        case 1:
            job = pick.choice(("", "nobody", "x" * 5000, "\0"))
            method = pick.choice(("ReportStopComplete", "ReportRecoverStrategy", "ReportRecoverStatus"))
            assert (await client.call(f"Recover/{method}", jobId=job)).code == 400
        case 2:
            found = damage.public_message()
            fields: dict[str, Any] = found if isinstance(found, dict) else {}
            try:
                answer = await client.call("PubFault/SendPublicFault", **fields)
            except (TypeError, ValueError, AttributeError):
                return  # that can't even be said
            assert answer.code in (0, 409, 410), answer
        case 3:
            code = pick.choice((7, -1, 2**31 - 1))
            answer = await client.call(
                "Recover/ReportRecoverStatus", jobId=client.job, status={"code": code}, strategy=pick.choice(("", "x"))
            )
            assert answer.code == 0


async def test_a_whole_clusterd(tmp_path: Path) -> None:
    damage, taken = Damage(SEED), 0
    async with running(tmp_path) as clusterd:
        training = await clusterd.train()
        client, signals = await training.join()
        kube = clusterd.cluster.kube
        for _ in range(OBJECTS):
            taken += await one(kube, damage, f"{training.name}-node-1")
            await say(client, damage)
        assert taken > OBJECTS // 4
        await kube.delete(CONFIG_MAP, "clusterd-config-cm", "cluster-system")
        assert not clusterd.clusterd.timeline.incidents(training.uid), f"seed {SEED}"
        await public_faults_are_taken(client)
        await recovers(clusterd, client, signals, training)


async def leave(kube: Kube, damage: Damage, jobs: Sequence[Training]) -> bool:
    """What ClusterD reads of what it has written, for one of these jobs or for none."""
    pick = damage.random
    job = pick.choice(jobs)
    uid = pick.choice((job.uid, job.uid, "nobody"))
    match pick.randrange(8):
        case 0 | 1 | 2:
            data = {keep.TEXT: damage.record(uid)}
            return await put(kube, "default", keep.PREFIX + uid, {pages.LABEL: "true"}, data)
        case 3:
            data = {each: damage.record(each) for each in (uid, "somebody")}
            return await put(kube, "default", f"{pages.PREFIX}{pick.randrange(3)}", {pages.LABEL: "true"}, data)
        case 4:
            data = {reasons.KEY: damage.reasons(f"default/{job.name}")}
            return await put(kube, reasons.NAMESPACE, reasons.NAME, {}, data)
        case 5:
            name, text = damage.report(f"fuzz-{pick.randrange(20)}")
            return await put(kube, outputs.NAMESPACE, name, outputs.LABELS, {name: text})
        case 6:
            return await put(kube, "default", f"reset-config-{job.name}", {"reset": "true"}, damage.reset())
        case _:
            data = {traces.KEY: damage.trace()}
            return await put(kube, "default", traces.PREFIX + job.name, traces.LABELS, data)


async def test_whatever_it_finds_when_it_begins(tmp_path: Path) -> None:
    """Half of it, that is; the other half comes while it leads. A job that is new recovers each time."""
    damage, jobs, taken = Damage(SEED), list[Training](), 0
    async with cluster(tmp_path) as server:
        for number in range(ROUNDS + 1):
            for _ in range(A_ROUND // 2 if jobs else 0):
                taken += await leave(server.kube, damage, jobs[-3:])
            async with leading(server, tmp_path) as clusterd:
                training = await clusterd.train(f"job-{number}")
                for _ in range(A_ROUND // 2 if jobs else 0):
                    taken += await leave(server.kube, damage, jobs[-3:])
                client, signals = await training.join()
                await recovers(clusterd, client, signals, training)
            jobs.append(training)
    assert taken > ROUNDS * A_ROUND // 3


def test_what_noded_reads() -> None:
    damage = Damage(SEED)
    for _ in range(TEXTS // 10):
        faults, _ = injected.read({"data": {injected.KEY: damage.injected()}}, NOW)
        assert [decode_fault(encode_fault(fault), NOW) for fault in faults] == faults, f"seed {SEED}"
        files = damage.levels()
        codes, _ = tables(files, files)
        for code in CODES:
            assert isinstance(codes.chip.get(code, ""), str), f"seed {SEED}"


async def ask(client: Client, requests: Requests, known: Known) -> None:
    """It is answered as documented."""
    method, content = requests.any()
    async with aio.timeout(PATIENCE):
        answer = await client.answer(method, content)
    right = documented(method, content, known)
    assert is_right(answer, right), f"seed {SEED}: {method.path}, {content!r}: {answer!r}, not of {right}"


async def test_whatever_is_asked(tmp_path: Path) -> None:
    """One job is asked for in every way; ClusterD goes on to serve, and leads another one through its recovery."""
    async with running(tmp_path) as clusterd:
        victim, training = await clusterd.train("victim"), await clusterd.train()
        await victim.join()
        client, signals = await training.join()
        requests = Requests(SEED, (victim.uid,))
        known = Known(victim.uid, {f"victim-node-{number}": ("0", "1") for number in range(victim.pods)})
        for _ in range(0, ASKED_OF_ALL, 60):
            await asyncio.gather(*(ask(client, requests, known) for _ in range(60)))
        await recovers(clusterd, client, signals, training)


async def public_faults_are_taken(client: Client) -> None:
    async with aio.timeout(PATIENCE):
        while True:
            answer = await client.call("PubFault/SendPublicFault", **PUBLIC)
            if answer.code != 410:  # there were many
                break
            await asyncio.sleep(0.5)
    assert answer.code == 0, answer


async def recovers(clusterd: Running, client: Client, signals: Any, training: Any) -> None:
    assert (await client.health())[0] == 0
    assert (await client.fault({1: 0}))[0] == 0
    for kind in ("stopTrain", "globalFault", "changeStrategy"):
        signal = await signals.next(PATIENCE)
        assert signal is not None and signal.type == kind, f"seed {SEED}: {signal}"
        if kind == "stopTrain":
            assert (await client.stopped())[0] == 0
        elif kind == "globalFault":
            assert (await client.can("retry", "recover", "dump", "exit"))[0] == 0
        else:
            assert signal.strategy == "retry"
            assert (await client.went("retry"))[0] == 0
    assert (await training.ended(True)).decision == "retry"
