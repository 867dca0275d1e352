"""The work of `evertrain inject`: the requests to the cluster, and waiting until noded has done its part."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial

from evertrain.cli import connection, printing
from evertrain.cli.connection import Connection
from evertrain.cli.running import CommandError, UsageError
from evertrain.faultcodes import overrides
from evertrain.faultcodes.table import Codes
from evertrain.kube.cache import Cache
from evertrain.kube.port import CONFIG_MAP, NODE, AlreadyExists, Conflict, NotFound, Object
from evertrain.noded import injected, picture, requests
from evertrain.noded.detectors.base import now_ms
from evertrain.noded.faults import AnyFault, ChipFault, Malformed, NodeFault, SwitchFault, code_of, decode, level_of
from evertrain.noded.requests import PublicFault
from evertrain.noded.tables import tables
from evertrain.wire import faultinfo

PATIENCE = 15.0
SHORTCUTS = {"link-down": requests.LINK_DOWN, "sub-health": requests.SUB_HEALTHY}


async def carry_out(arguments: argparse.Namespace) -> int:
    kube = connection.connect(connection.choose_kubeconfig(arguments.kubeconfig, arguments.data_dir))
    try:
        if arguments.kind == "list":
            return await _list(kube, arguments)
        if arguments.kind == "clear":
            return await _clear(kube, arguments)
        if arguments.kind == "public":
            return await _public(kube, arguments)
        return await _inject(kube, arguments)
    except Malformed as error:
        raise UsageError(str(error)) from None
    finally:
        await kube.close()


async def _inject(kube: Connection, arguments: argparse.Namespace) -> int:
    kind = "chip" if arguments.kind in SHORTCUTS else arguments.kind
    code = code_of(kind, SHORTCUTS.get(arguments.kind) or arguments.code)
    level = level_of(kind, getattr(arguments, "level", ""))
    nodes = {name: await _node(kube, name) for name in arguments.node}
    faults = {name: _faults(arguments, kind, code, level, _chips(node)) for name, node in nodes.items()}
    if arguments.clear:
        return await _take_back(kube, faults, wait=not arguments.no_wait)
    meaning = requests.explain(kind, code, level, await _codes(kube))
    for name, new in faults.items():
        await _change(kube, name, partial(requests.with_faults, new=new))
        if not arguments.no_wait:
            await _published(kube, name, new, True)
        for fault in new:
            text = (
                "now ManuallySeparateNPU, for it came too often" if await _is_kept_away(kube, name, fault) else meaning
            )
            print(f"{name} {requests.describe(fault)}: {code} injected, {text}", flush=True)
    return 0


def _faults(arguments: argparse.Namespace, kind: str, code: str, level: str, chips: picture.Chips) -> list[AnyFault]:
    now = now_ms()
    common: Object = {"kind": kind, "code": code, "since": now, "level": level, "note": arguments.note or "injected"}
    if arguments.seconds:
        common["until"] = now + int(arguments.seconds * 1000)
    if kind == "node":
        return [decode(common | {"device": arguments.device, "id": arguments.id}, now)]
    if kind == "switch":
        return [decode(common | {"chip": arguments.switch_chip, "port": arguments.port}, now)]
    return [decode(common | {"chip": number}, now) for number in requests.chips_meant(arguments.chip, chips)]


async def _take_back(kube: Connection, faults: dict[str, list[AnyFault]], *, wait: bool) -> int:
    for name, listed in faults.items():
        keys = {fault.key for fault in listed}
        there, _ = injected.read(await _injected(kube, name), now_ms())
        known = [fault for fault in there if fault.key in keys]
        if not known:
            raise CommandError(f"no such fault is injected on {name}; `evertrain inject list` names what is")
        await _change(kube, name, partial(requests.without, keys=keys))
        if wait:
            await _published(kube, name, known, False)
        for fault in known:
            print(f"{name} {requests.describe(fault)}: {fault.code} cleared", flush=True)
    return 0


async def _list(kube: Connection, arguments: argparse.Namespace) -> int:
    codes = await _codes(kube)
    rows = [["NODE", "KIND", "WHERE", "CODE", "LEVEL", "SINCE", "UNTIL"]]
    now = now_ms()
    for item in (await kube.list(CONFIG_MAP, injected.NAMESPACE, labels=f"{injected.LABEL}=true")).items:
        name = injected.node_of(item)
        faults, wrong = injected.read(item, now)
        for text in wrong:
            rows.append([name, "-", text, "", "", "", ""])
        for judged in picture.judge(faults, codes):
            fault = judged.fault
            if fault.until_ms is None or fault.until_ms > now:
                since, until = _moment(fault.since_ms), _moment(fault.until_ms)
                where = requests.describe(fault)
                rows.append([name, str(fault.key[0]), where, fault.code, judged.level, since, until])
    for public in await _public_faults(kube):
        where = f"chip {requests.spans(public.chips)}"
        level = codes.public_level(public.code) or "-"
        rows.append([public.node, "public", where, public.code, level, _moment(public.time_ms), "-"])
    wanted = set(arguments.node)
    rows = [row for row in rows if row is rows[0] or not wanted or row[0] in wanted]
    print(printing.aligned(rows) if len(rows) > 1 else "Nothing is injected.")
    return 0


async def _clear(kube: Connection, arguments: argparse.Namespace) -> int:
    wanted = set(arguments.node)
    for name in wanted:
        await _node(kube, name)
    cleared = 0
    for item in (await kube.list(CONFIG_MAP, injected.NAMESPACE, labels=f"{injected.LABEL}=true")).items:
        name = injected.node_of(item)
        faults, _ = injected.read(item, now_ms())
        if (wanted and name not in wanted) or not faults:
            continue
        await _change(kube, name, lambda _: [])
        live = [fault for fault in faults if fault.until_ms is None or fault.until_ms > now_ms()]
        if not arguments.no_wait and live:
            await _published(kube, name, live, False)
        for fault in live:
            print(f"{name} {requests.describe(fault)}: {fault.code} cleared", flush=True)
            cleared += 1
    for public in await _public_faults(kube):
        if not wanted or public.node in wanted:
            await _end_public(kube, public)
            cleared += 1
    cleared += await _release(kube, wanted)
    if not cleared:
        print("Nothing was injected.")
    return 0


async def _release(kube: Connection, wanted: set[str]) -> int:
    """Chips that a rule keeps away until somebody says otherwise."""
    labels = ",".join(f"{key}={value}" for key, value in faultinfo.LABELS.items())
    count = 0
    for item in (await kube.list(CONFIG_MAP, faultinfo.DEVICE_NAMESPACE, labels=labels)).items:
        name = item["metadata"]["name"].removeprefix(faultinfo.DEVICE_PREFIX)
        chips = faultinfo.names((item.get("data") or {}).get(faultinfo.MANUALLY_SEPARATE) or "")
        if not chips or (wanted and name not in wanted):
            continue
        patch = {"data": {faultinfo.MANUALLY_SEPARATE: ""}}
        await kube.patch(CONFIG_MAP, item["metadata"]["name"], faultinfo.DEVICE_NAMESPACE, patch)
        print(f"{name}: {', '.join(chips)} may be used again", flush=True)
        count += len(chips)
    return count


# --- public faults


async def _public(kube: Connection, arguments: argparse.Namespace) -> int:
    codes = await _codes(kube)
    level = codes.public_level(arguments.code)
    if level is None and not arguments.clear:
        known = ", ".join(sorted(codes.public))
        raise UsageError(f"{arguments.code!r} is no code of a public fault that ClusterD takes: {known}")
    if arguments.resource not in codes.resources:
        raise UsageError(f"--resource is one of {', '.join(sorted(codes.resources))}")
    for name in arguments.node:
        node = await _node(kube, name)
        chips = requests.chips_meant(arguments.chip, _chips(node))
        identity = f"inject-{name}-{arguments.code}-{requests.spans(chips).replace(',', '.')}"[:128]
        fault = PublicFault(
            id=identity,
            code=arguments.code,
            node=name,
            chips=chips,
            resource=arguments.resource,
            type=arguments.type or requests.public_type(arguments.code),
            time_ms=now_ms(),
            assertion=requests.ONCE if arguments.once else requests.OCCUR,
            description=arguments.description or "injected",
        )
        if arguments.clear:
            there = [each for each in await _public_faults(kube) if each.id == fault.id]
            if not there:
                raise CommandError(f"no such fault is injected on {name}; `evertrain inject list` names what is")
            await _end_public(kube, there[0])
            continue
        await _put(kube, requests.public_config_map(fault, injected.NAMESPACE, now_ms()))
        print(f"{name} chip {requests.spans(chips)}: public fault {arguments.code} reported, level {level}", flush=True)
    return 0


async def _public_faults(kube: Connection) -> list[PublicFault]:
    """Those that go on."""
    items = (await kube.list(CONFIG_MAP, injected.NAMESPACE, labels=f"{requests.MARK}=true")).items
    found = [requests.read_public(item) for item in items]
    return [fault for fault in found if fault is not None and fault.assertion == requests.OCCUR]


async def _end_public(kube: Connection, fault: PublicFault) -> None:
    """ClusterD is told that it is over; that the ConfigMap is deleted tells it nothing."""
    over = replace(fault, assertion=requests.RECOVER)
    await _put(kube, requests.public_config_map(over, injected.NAMESPACE, now_ms()))
    print(f"{fault.node} chip {requests.spans(fault.chips)}: public fault {fault.code} is over", flush=True)


async def _put(kube: Connection, item: Object) -> None:
    try:
        await kube.create(CONFIG_MAP, item)
    except AlreadyExists:
        await kube.replace(CONFIG_MAP, item)


# --- the cluster


async def _node(kube: Connection, name: str) -> Object:
    try:
        return await kube.get(NODE, name)
    except NotFound:
        names = [item["metadata"]["name"] for item in (await kube.list(NODE)).items]
        listed = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        raise UsageError(f"there is no node {name}; there are {listed or 'none'}") from None


def _chips(node: Object) -> picture.Chips:
    annotations = node["metadata"].get("annotations") or {}
    return picture.chips_of(annotations, (node.get("status") or {}).get("capacity") or {})


async def _codes(kube: Connection) -> Codes:
    """As noded on this cluster has them."""
    chip, node = [
        await _data(kube, name, namespace) for namespace, name in (overrides.CHIP_CONFIG, overrides.NODE_CONFIG)
    ]
    return tables(chip, node)[0]


async def _data(kube: Connection, name: str, namespace: str) -> dict[str, str] | None:
    try:
        return (await kube.get(CONFIG_MAP, name, namespace)).get("data")
    except NotFound:
        return None


async def _injected(kube: Connection, node: str) -> Object | None:
    try:
        return await kube.get(CONFIG_MAP, injected.name_of(node), injected.NAMESPACE)
    except NotFound:
        return None


async def _change(kube: Connection, node: str, change: Callable[[list[AnyFault]], list[AnyFault]]) -> None:
    """Also if somebody else does so at the same time. What is over by time is left out."""
    while True:
        there = await _injected(kube, node)
        now = now_ms()
        before, wrong = injected.read(there, now)
        if wrong:
            raise CommandError(f"ConfigMap {injected.name_of(node)} can't be understood ({wrong[0]}); delete it first")
        live = [fault for fault in before if fault.until_ms is None or fault.until_ms > now]
        item = injected.config_map(node, change(live))
        try:
            if there is None:
                await kube.create(CONFIG_MAP, item)
            else:
                item["metadata"]["resourceVersion"] = there["metadata"]["resourceVersion"]
                await kube.replace(CONFIG_MAP, item)
            return
        except (AlreadyExists, Conflict, NotFound):
            continue


async def _published(kube: Connection, node: str, faults: Sequence[AnyFault], there: bool) -> None:
    """Until noded has published the faults, or no longer does."""
    device, info = faultinfo.DEVICE_PREFIX + node, faultinfo.NODE_PREFIX + node
    parts = [fault for fault in faults if isinstance(fault, NodeFault)]
    others = [fault for fault in faults if not isinstance(fault, NodeFault)]
    for name, namespace, meant in (
        (device, faultinfo.DEVICE_NAMESPACE, others),
        (info, faultinfo.NODE_NAMESPACE, parts),
    ):
        if meant and not await _is_so(kube, name, namespace, meant, there):
            what = "published it" if there else "stopped publishing it"
            raise CommandError(
                f"it is written down, but noded of {node} has not {what} in {PATIENCE:g} s. "
                "Does the node run (`evertrain node list`), and noded on it?"
            )


async def _is_so(kube: Connection, name: str, namespace: str, faults: Sequence[AnyFault], there: bool) -> bool:
    cache = Cache(kube, CONFIG_MAP, namespace, fields=f"metadata.name={name}")
    task = asyncio.create_task(cache.run())

    def done() -> bool:
        data = (next(iter(cache), None) or {}).get("data") or {}
        return cache.synced.is_set() and all(
            _is_published(data, fault) == there or (not there and _is_held(data, fault)) for fault in faults
        )

    try:
        return await cache.until(done, PATIENCE)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _is_published(data: dict[str, str], fault: AnyFault) -> bool:
    try:
        match fault:
            case NodeFault():
                parts = faultinfo.decode_node(data[faultinfo.NODE_INFO]).faults
                return any(
                    part.type == fault.device and part.id == fault.id and fault.code in part.codes for part in parts
                )
            case SwitchFault():
                listed = faultinfo.decode_switch(data[faultinfo.SWITCH_INFO]).faults
                return any((each.code, each.chip, each.port) == (fault.code, fault.chip, fault.port) for each in listed)
            case ChipFault():
                chips = faultinfo.decode_device(data[faultinfo.DEVICE_INFO]).faults
                return any(each.code == fault.code and each.chip.endswith(f"-{fault.chip}") for each in chips)
    except (KeyError, faultinfo.BadInfo):
        return False


async def _is_kept_away(kube: Connection, node: str, fault: AnyFault) -> bool:
    """Has a rule made the chip one that nobody uses until it is cleared?"""
    if not isinstance(fault, ChipFault):
        return False
    data = await _data(kube, faultinfo.DEVICE_PREFIX + node, faultinfo.DEVICE_NAMESPACE) or {}
    chips = faultinfo.names(data.get(faultinfo.MANUALLY_SEPARATE) or "")
    return any(chip.endswith(f"-{fault.chip}") for chip in chips)


def _is_held(data: dict[str, str], fault: AnyFault) -> bool:
    """A rule keeps it for a while after it has gone."""
    try:
        reasons = json.loads(data.get(faultinfo.UPGRADE_REASON) or "{}")
        held = [(chip, each["fault_code"]) for chip, listed in reasons.items() for each in listed]
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return isinstance(fault, ChipFault) and any(
        chip.endswith(f"-{fault.chip}") and code == fault.code for chip, code in held
    )


def _moment(ms: int | None) -> str:
    if ms is None:
        return "-"
    return datetime.fromtimestamp(ms / 1000, timezone.utc).astimezone().strftime("%H:%M:%S")
