"""The daemon of one node: detectors and injected faults in, ConfigMaps out.

It looks at everything that it knows whenever something changes, and at the times at which something changes by itself;
the sheets write what is different from what is there. What it must not forget over a restart is in what it has
published: since when each fault is there, what the rules have counted, which chips are kept away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from evertrain import aio
from evertrain.faultcodes.rules import Upgrade, Upgrades
from evertrain.kube.port import NODE, Kube, Object
from evertrain.noded import codes, contents, injected, picture
from evertrain.noded.announce import OCCUR, Announcer, differences, message
from evertrain.noded.board import BEFORE, Board
from evertrain.noded.contents import DeviceContent, NodeContent
from evertrain.noded.detectors.base import Detector, Resumes, now_ms
from evertrain.noded.faults import CHIP_CODE, AnyFault, ChipFault, Key, NodeFault
from evertrain.noded.picture import Chips
from evertrain.noded.sheet import GAP, Sheet
from evertrain.noded.sources import Sources
from evertrain.noded.tables import tables
from evertrain.wire import faultinfo
from evertrain.wire.faultinfo import BadInfo

logger = logging.getLogger(__name__)

DEVICE_SECONDS, NODE_SECONDS = 300.0, 1800.0
"""What hasn't changed is written again after this, so that others see that we live."""
MANAGED, OURS = "app.kubernetes.io/managed-by", "evertrain-noded"
FIRST_DELAY, MAX_DELAY = 1.0, 60.0
SETTLE_SECONDS = 60.0
"""A detector that has not said anything by then has nothing to say, unless it has failed: then it has not looked."""
ENDED = ("Succeeded", "Failed")
INJECTED = "injected"
AUTO, ON, OFF = "auto", "on", "off"


def is_ours(item: Object) -> bool:
    return (item["metadata"].get("labels") or {}).get(MANAGED) == OURS


class NodeDaemon:
    def __init__(
        self,
        kube: Kube,
        node: str,
        sources: Sources,
        *,
        detectors: Sequence[Detector] = (),
        device_info: str = ON,
        config: str = "",
        device_seconds: float = DEVICE_SECONDS,
        node_seconds: float = NODE_SECONDS,
        gap: float = GAP,
    ) -> None:
        """`device_info`: publish the chips; `auto`: unless somebody else does. `config`: a NodeDConfiguration.json."""
        self.node = node
        self._sources = sources
        self._detectors = detectors
        self._device_info = device_info
        self._config = config
        labels = {**faultinfo.LABELS, MANAGED: OURS}
        self.device = Sheet(
            kube,
            faultinfo.DEVICE_PREFIX + node,
            faultinfo.DEVICE_NAMESPACE,
            every=device_seconds,
            gap=gap,
            labels=labels,
            mine=is_ours if device_info == AUTO else lambda _: True,
        )
        self.info = Sheet(
            kube, faultinfo.NODE_PREFIX + node, faultinfo.NODE_NAMESPACE, every=node_seconds, gap=gap, labels=labels
        )
        self._announcer = Announcer(kube, node)
        self._board = Board()
        self._codes, _ = tables(None, None, config)
        self._upgrades = Upgrades(self._codes)
        self._separated: set[str] = set()
        """As ManuallySeparateNPU had them when we saw it last."""
        self._silent = {detector.name for detector in detectors}
        """Those that have not said anything yet."""
        self._before: list[AnyFault] = []
        """What a noded before us has published, and nobody has had time to confirm."""
        self._late = False
        """Who has not failed has had its time."""
        self._told_before: set[Key] = set()
        """Faults of which a noded before us has told."""
        self._known: dict[Key, tuple[AnyFault, str]] = {}
        self.detector_failures = Counter({detector.name: 0 for detector in detectors})
        self._chips = Chips()
        self._node_known = False
        """It was there once."""
        self._device_seen: list[Object | None] = []
        """The newest word of the watch, if there is one."""
        self._complaints: list[str] = []
        self._news = asyncio.Event()

    @property
    def faults(self) -> Collection[tuple[AnyFault, str]]:
        """Those in force, with their levels."""
        return self._known.values()

    async def run(self) -> None:
        """Until it is cancelled. What is published stays: nobody has said that the faults are over."""
        await self._sources.ready()
        self._sources.attach(self)
        settle = asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._settle_late)
        try:
            chip_faults = self._restore(self._sources.devices.get(self.device.name, self.device.namespace))
            node_faults = self._restore_info(self._sources.infos.get(self.info.name, self.info.namespace))
            before: list[AnyFault] = [*chip_faults, *node_faults]
            self._board.put(BEFORE, before, timed=True)
            self._before = before
            self._told_before = {fault.key for fault in before}
            for detector in self._detectors:
                if isinstance(detector, Resumes):
                    detector.resume(before)
            self._settle()
            async with aio.TaskGroup() as tasks:
                tasks.create_task(self.device.run())
                tasks.create_task(self.info.run())
                tasks.create_task(self._announcer.run())
                for detector in self._detectors:
                    tasks.create_task(self._detect(detector), name=detector.name)
                tasks.create_task(self._keep())
        finally:
            settle.cancel()
            self._sources.detach(self)

    # --- what others tell

    def changed(self) -> None:
        self._news.set()

    def device_seen(self, item: Object | None) -> None:
        listed = set(faultinfo.names(((item or {}).get("data") or {}).get(faultinfo.MANUALLY_SEPARATE) or ""))
        for chip in self._separated - listed if item is not None else ():
            logger.warning("%s was cleared by hand", chip)
            self._upgrades.clear(chip)
        self._separated = listed if item is not None else self._separated
        # The sheet hears of it when it is clear what is wanted now; else it would write what was wanted before.
        self._device_seen = [item]
        self._news.set()

    def node_seen(self, item: Object | None) -> None:
        self.info.seen(item)

    def tell(self, source: str, faults: Iterable[AnyFault]) -> None:
        if self._board.put(source, faults):
            self._news.set()
        self._settle(source)

    def _settle(self, *told: str) -> None:
        """What we have found when we came counts until everybody has looked."""
        self._silent -= set(told)
        if not self._silent:
            self._before = []
        elif self._late:
            self._before = [fault for fault in self._before if self._may_be_told(fault)]
        if self._board.put(BEFORE, self._before, timed=True):
            self._news.set()

    def _settle_late(self) -> None:
        """One that only fails can't say that its faults are over. Those of others need not wait for it."""
        self._late = True
        self._settle(*(name for name in self._silent if not self.detector_failures[name]))

    def _may_be_told(self, fault: AnyFault) -> bool:
        of_node = isinstance(fault, NodeFault)
        return any(codes.may_tell(name, fault.code, of_node=of_node) for name in self._silent)

    async def _detect(self, detector: Detector) -> None:
        """One that fails is started again, and what it told stays until it tells something else."""
        delay = FIRST_DELAY
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await detector.run(lambda faults: self.tell(detector.name, faults))
                logger.info("detector %s has nothing to look at here", detector.name)
                self._settle(detector.name)
                return
            except Exception:
                self.detector_failures[detector.name] += 1
                logger.exception("detector %s has failed; it is started again", detector.name)
            lasted = asyncio.get_running_loop().time() - began
            delay = FIRST_DELAY if lasted > MAX_DELAY else min(MAX_DELAY, delay * 2)
            await asyncio.sleep(delay)

    # --- what is published

    async def _keep(self) -> None:
        while True:
            self._news.clear()
            now = now_ms()
            self._look(now)
            for item in self._device_seen:
                self.device.seen(item)
            self._device_seen = []
            times = [each for each in (self._board.next_ms, self._upgrades.next_ms(now)) if each is not None]
            with contextlib.suppress(TimeoutError):
                async with aio.timeout(max(0.01, (min(times) - now_ms()) / 1000) if times else None):
                    await self._news.wait()

    def _look(self, now: int) -> None:
        self._read_config()
        faults, wrong = injected.read(self._sources.injected.get(injected.name_of(self.node), injected.NAMESPACE), now)
        self._complain(wrong)
        self._board.put(INJECTED, faults, timed=True)
        self._board.expire(now)
        judged = picture.judge(self._board.faults(), self._codes)
        self._announce({each.fault.key: (each.fault, each.level) for each in judged})
        info = picture.node_info(judged)
        self.info.want(NodeContent(info) if info.faults else None)
        node = self._sources.nodes.get(self.node) or {"metadata": {}}
        self._belong(node["metadata"])
        annotations = node["metadata"].get("annotations") or {}
        chips = picture.chips_of(annotations, (node.get("status") or {}).get("capacity") or {})
        if chips.type:  # a node that has lost its chips for a moment hasn't
            self._chips = chips
        if self._chips.type and self._device_info != OFF:
            self.device.want(self._content(judged, now))

    def _belong(self, node: Object) -> None:
        """Nodes come and go under new names: what is published about one that has gone must not stay for ever."""
        uid = node.get("uid")
        if not uid and not self._node_known:
            return
        self._node_known = True
        owner = {"apiVersion": NODE.api_version, "kind": NODE.kind, "name": self.node, "uid": uid} if uid else None
        for sheet in (self.device, self.info):
            sheet.belongs(owner)

    def _content(self, judged: list[picture.Judged], now: int) -> DeviceContent:
        chips = self._chips
        present: dict[int, dict[str, int]] = {}
        for each in judged:
            if isinstance(each.fault, ChipFault):
                present.setdefault(each.fault.chip, {})[each.fault.code] = each.fault.since_ms
        upgrades: dict[int, tuple[Upgrade, ...]] = {
            number: self._upgrades.observe(chips.name(number), present.get(number, {}), now) for number in chips.numbers
        }
        separated = self._separated | set(self._upgrades.manual())
        manual = [number for number in chips.numbers if chips.name(number) in separated]
        switch = picture.switch_info(judged)
        return DeviceContent(
            picture.device_info(chips, self._used(), judged, upgrades, manual, self._codes),
            switch if switch.faults else None,
            tuple(map(chips.name, manual)),
            contents.upgrade_reasons({chips.name(number): them for number, them in upgrades.items()}),
            self._upgrades.dump().decode(),
        )

    def _used(self) -> frozenset[int]:
        pods = self._sources.pods.select("node", self.node)
        running = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in ENDED]
        return picture.used_chips(self._chips.type, [pod["metadata"].get("annotations") or {} for pod in running])

    def _read_config(self) -> None:
        chip, node = (next(iter(cache), None) for cache in (self._sources.chip_config, self._sources.node_config))
        found, wrong = tables((chip or {}).get("data"), (node or {}).get("data"), self._config)
        self._complain(wrong)
        if found is not self._codes:
            self._codes = found
            self._upgrades.rules(found)

    def _restore(self, item: Object | None) -> list[ChipFault]:
        """From what a noded before us has published."""
        found = []
        data = (item or {}).get("data") or {}
        if item is not None and is_ours(item):
            state = (item["metadata"].get("annotations") or {}).get(contents.STATE) or ""
            with contextlib.suppress(ValueError):
                self._upgrades.load(state.encode())
            with contextlib.suppress(BadInfo):
                for fault in faultinfo.decode_device(data.get(faultinfo.DEVICE_INFO) or "").faults:
                    number = fault.chip.rpartition("-")[2]
                    if number.isdecimal() and CHIP_CODE.fullmatch(fault.code):
                        since, chip = fault.time_ms, int(number)
                        found.append(ChipFault(code=fault.code, chip=chip, since_ms=since, level=fault.level))
                        self._board.remember(found[-1].key, since)
        self._separated = set(faultinfo.names(data.get(faultinfo.MANUALLY_SEPARATE) or ""))
        self.device.seen(item)
        if item is not None and self._device_info == AUTO and not is_ours(item):
            logger.warning("%s is written by somebody else: chips are left to them", self.device.name)
        return found

    def _restore_info(self, item: Object | None) -> list[NodeFault]:
        found = []
        with contextlib.suppress(BadInfo):
            text = ((item or {}).get("data") or {}).get(faultinfo.NODE_INFO) or ""
            for fault in faultinfo.decode_node(text).faults:
                for code in fault.codes:  # since when isn't written there, nor is the level of each
                    level = "" if self._codes.node_level(code) else fault.level
                    found.append(NodeFault(code=code, device=fault.type, id=fault.id, since_ms=now_ms(), level=level))
                    self._board.remember(found[-1].key, found[-1].since_ms)
        self.info.seen(item)
        return found

    def _announce(self, known: dict[Key, tuple[AnyFault, str]]) -> None:
        before, self._known = self._known, known
        uid = str((self._sources.nodes.get(self.node) or {"metadata": {}})["metadata"].get("uid", ""))
        for news in differences(before, known):
            if news[0] == OCCUR and news[1].key in self._told_before:
                self._told_before.discard(news[1].key)
                continue
            logger.warning("%s: %s: %s", self.node, news[0], message(*news[1:]))
            self._announcer.tell(news, uid)

    def _complain(self, wrong: list[str]) -> None:
        for text in wrong:
            if text not in self._complaints:
                logger.warning("%s: %s", self.node, text)
                self._complaints = [*self._complaints[-50:], text]
