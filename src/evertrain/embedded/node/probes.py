"""Readiness and liveness of a running container: by a program in it, a connection, or a request."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evertrain import aio
from evertrain.embedded.node.lifecycle import ContainerRun, Running

if TYPE_CHECKING:
    from evertrain.embedded.node.pod import PodWorker

_KINDS = ("startup", "liveness", "readiness")
_TRUSTING = ssl.create_default_context()
"""As the kubelet's: a probe doesn't ask whose certificate it is."""
_TRUSTING.check_hostname = False
_TRUSTING.verify_mode = ssl.CERT_NONE


class Prober:
    def __init__(self, worker: PodWorker, container: ContainerRun, address: str) -> None:
        self._worker = worker
        self._container = container
        self._address = address
        self._state = container.state
        self._probes: dict[str, Mapping[str, Any]] = {
            kind: probe for kind in _KINDS if (probe := container.spec.get(f"{kind}Probe"))
        }

    @property
    def wanted(self) -> bool:
        return bool(self._probes)

    @property
    def delays_ready(self) -> bool:
        return "readiness" in self._probes or "startup" in self._probes

    async def run(self) -> None:
        """As long as this run of the container lasts."""
        if "startup" in self._probes and not await self._until_started(self._probes["startup"]):
            return
        if "readiness" not in self._probes:
            self._set_ready(True)
        others = [kind for kind in ("liveness", "readiness") if kind in self._probes]
        await asyncio.gather(*(self._repeat(kind, self._probes[kind]) for kind in others))

    def _runs(self) -> bool:
        return isinstance(self._container.state, Running) and self._container.state is self._state

    def _set_ready(self, ready: bool) -> None:
        if self._runs() and self._container.ready != ready:
            self._container.ready = ready
            self._worker.wake()

    async def _until_started(self, probe: Mapping[str, Any]) -> bool:
        await asyncio.sleep(float(probe.get("initialDelaySeconds") or 0))
        for _ in range(int(probe.get("failureThreshold") or 3)):
            if not self._runs():
                return False
            if await self._try("startup", probe):
                return True
            await asyncio.sleep(float(probe.get("periodSeconds") or 10))
        self._restart()
        return False

    async def _repeat(self, kind: str, probe: Mapping[str, Any]) -> None:
        await asyncio.sleep(float(probe.get("initialDelaySeconds") or 0))
        needed, allowed = int(probe.get("successThreshold") or 1), int(probe.get("failureThreshold") or 3)
        good = bad = 0
        while self._runs():
            if await self._try(kind, probe):
                good, bad = good + 1, 0
            else:
                good, bad = 0, bad + 1
            if kind == "readiness" and (good >= needed or bad >= allowed):
                self._set_ready(good >= needed)
            if kind == "liveness" and bad >= allowed:
                self._restart()
                return
            await asyncio.sleep(float(probe.get("periodSeconds") or 10))

    def _restart(self) -> None:
        if self._runs():
            self._container.unhealthy = "Unhealthy"
            self._worker.tell_restart(self._container)
            self._worker.wake()

    async def _try(self, kind: str, probe: Mapping[str, Any]) -> bool:
        began = time.monotonic()
        try:
            async with aio.timeout(float(probe.get("timeoutSeconds") or 1)):
                complaint = await self._ask(probe)
        except (OSError, TimeoutError, ValueError) as error:
            complaint = str(error) or f"no answer after {time.monotonic() - began:.1f} s"
        if complaint and self._runs():
            self._worker.unhealthy(self._container, f"{kind.capitalize()} probe failed: {complaint}")
        return not complaint

    async def _ask(self, probe: Mapping[str, Any]) -> str:
        if command := (probe.get("exec") or {}).get("command"):
            code = await self._worker.execute(self._container.name, [str(word) for word in command])
            return "" if code == 0 else f"command exited with code {code}"
        target = probe.get("tcpSocket") or probe.get("httpGet") or {}
        if not target:
            return "only exec, tcpSocket and httpGet probes are supported here"
        secure = _TRUSTING if str(target.get("scheme") or "").upper() == "HTTPS" else None
        host = str(target.get("host") or self._address)
        reader, writer = await self._worker.connect(host, self._port(target.get("port")), secure)
        try:
            if not probe.get("httpGet"):
                return ""
            path = str(target.get("path") or "/")
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {self._address}\r\nUser-Agent: kube-probe\r\n\r\n".encode())
            words = (await reader.readline()).split()
            code = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
            return "" if 200 <= code < 400 else f"HTTP probe failed with statuscode: {code}"
        finally:
            writer.close()

    def _port(self, given: object) -> int:
        if isinstance(given, int):
            return given
        for port in self._container.spec.get("ports") or []:
            if port.get("name") == given:
                return int(port["containerPort"])
        return int(str(given))
