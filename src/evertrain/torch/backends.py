"""The collective libraries, and what differs between them: building a group, and waking whoever is blocked in it.

gloo blocks the calling thread and can't be aborted (its own `abort()` wakes nobody), so its connections are shut down
under it and the main thread never waits inside it without a way out (`groups`). NCCL and HCCL run operations on the
device; a wait only enqueues a dependency on a stream, and both libraries have an abort.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evertrain.torch import nics, sockets

GLOO_HOST, POD_IP = "EVERTRAIN_GLOO_HOST", "POD_IP"


@dataclass(eq=False)
class RawGroup:
    """A group as the library built it, before it is guarded."""

    group: dist.ProcessGroup
    """torch's own front of the library: all operations under all of their names."""
    backend: Any
    """The library's object behind it."""
    device: torch.device
    kind: Any
    """Its `ProcessGroup.BackendType`."""
    sockets: list[sockets.Socket] = field(default_factory=list)
    host: RawGroup | None = None
    """For tensors in host memory, if this one can't take them."""

    def of(self, operands: Any) -> RawGroup:
        """The group for an operation on these."""
        if self.host is None:
            return self
        first = _first_tensor(operands)
        return self if first is None or first.device.type != "cpu" else self.host


class Backend(ABC):
    """One collective library."""

    name: str
    """What `dist.get_backend()` calls it."""
    host_waits: bool
    """True: waiting for an operation blocks the calling thread. False: it only enqueues on a stream."""

    @abstractmethod
    def create(self, store: dist.Store, rank: int, size: int, timeout: float) -> RawGroup:
        """Build the group with all members. Blocks until they are there or the timeout has passed."""

    @abstractmethod
    def stop(self, raw: RawGroup) -> None:
        """Wake whoever is blocked in the group, here and at the peers. The group is unusable afterwards."""

    def is_broken(self, error: Exception) -> bool:
        """Does an error that an operation raised at its start mean that the group is broken, not that its caller
        passed something wrong?"""
        return isinstance(error, dist.DistBackendError | dist.DistNetworkError)


def _raw(store: dist.Store, rank: int, size: int, kind: Any, device: torch.device, backend: Any) -> RawGroup:
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return RawGroup(group, backend, device, kind)


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list | tuple):
        return next((found for item in value if (found := _first_tensor(item)) is not None), None)
    return None


class Gloo(Backend):
    """gloo on the host's memory.

    Every pair of members is connected while the group is built (`lazy_init` is off), so that its sockets can be told
    once and for all. Members publish the address they listen on, which identifies the connections between them.
    """

    name = "gloo"
    host_waits = True

    def __init__(self, nic: str | None = None) -> None:
        """On this link (an interface or an address), by default on the one that this process uses."""
        self._nic = nic

    def create(self, store: dist.Store, rank: int, size: int, timeout: float) -> RawGroup:
        before = sockets.opened()
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [_gloo_device(self._nic or nics.current())]
        store.set(f"listens/{rank}", "\n".join(sockets.listening(sockets.opened() - before)))
        backend = dist.ProcessGroupGloo(store, rank, size, options)
        listeners = {line for peer in range(size) for line in store.get(f"listens/{peer}").decode().splitlines()}
        raw = _raw(store, rank, size, dist.ProcessGroup.BackendType.GLOO, torch.device("cpu"), backend)
        raw.sockets = sockets.between(sockets.opened() - before, listeners)
        return raw

    def stop(self, raw: RawGroup) -> None:
        sockets.half_close(raw.sockets)

    def is_broken(self, error: Exception) -> bool:
        # Errors of gloo itself name the place in its source; complaints about arguments don't.
        return super().is_broken(error) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


def _gloo_device(nic: str | None) -> Any:
    host, interface = os.environ.get(GLOO_HOST), os.environ.get(nics.INTERFACE)
    if nic is not None:
        host, interface = (nic, None) if nics.is_address(nic) else (None, nic)
    create_device = dist.ProcessGroupGloo.create_device
    # Older versions of torch connect at once and know no other way.
    eager = {"lazy_init": False} if "lazy_init" in (create_device.__doc__ or "") else {}
    if host or not interface:
        # The pods of a job see each other by the addresses that the cluster has given them, and by no other.
        return create_device(hostname=host or os.environ.get(POD_IP) or "127.0.0.1", **eager)
    return create_device(interface=interface.split(",")[0], **eager)


class OnDevice(Backend):
    """A library for tensors on devices. It gets a gloo group beside it: a repair sends a state from host memory."""

    host_waits = False

    def __init__(self) -> None:
        self._host = Gloo()

    def create(self, store: dist.Store, rank: int, size: int, timeout: float) -> RawGroup:
        raw = self.connect(store, rank, size, timeout)
        raw.host = self._host.create(dist.PrefixStore("host/", store), rank, size, timeout)
        return raw

    def stop(self, raw: RawGroup) -> None:
        if raw.host is not None:
            self._host.stop(raw.host)
        self.abort(raw)

    def is_broken(self, error: Exception) -> bool:
        return self._host.is_broken(error)

    @abstractmethod
    def connect(self, store: dist.Store, rank: int, size: int, timeout: float) -> RawGroup:
        """Build the library's own group."""

    @abstractmethod
    def abort(self, raw: RawGroup) -> None:
        """End whatever runs in it."""


class Nccl(OnDevice):
    """NCCL on NVIDIA devices. Written against torch's documented calls; not run on hardware by this project's tests."""

    name = "nccl"

    def connect(self, store: dist.Store, rank: int, size: int, timeout: float) -> RawGroup:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        device = torch.device("cuda", torch.cuda.current_device())
        # The communicator is formed now, not in the first step: a peer that is gone shows up while groups are built.
        backend.eager_connect_single_device(device)
        return _raw(store, rank, size, dist.ProcessGroup.BackendType.NCCL, device, backend)

    def abort(self, raw: RawGroup) -> None:
        raw.backend.abort()


class Hccl(OnDevice):
    """HCCL on Ascend devices, by torch_npu's own recovery calls. Not run on hardware by this project's tests.

    `stop_device` makes everything that runs on the device return with an error, `abort_hccl_comm` ends the
    communicators, and before the device is used again `restart_device` has to bring it back.
    """

    name = "hccl"

    def __init__(self) -> None:
        super().__init__()
        self._stopped: set[int] = set()

    def connect(self, store: dist.Store, rank: int, size: int, timeout: float) -> RawGroup:
        import torch_npu
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        index = torch_npu.npu.current_device()
        if index in self._stopped:
            torch_npu.npu.restart_device(index)
            self._stopped.discard(index)
        options = ProcessGroupHCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        backend = ProcessGroupHCCL(store, rank, size, options)
        device = torch.device("npu", index)
        return _raw(store, rank, size, dist.ProcessGroup.BackendType.CUSTOM, device, backend)

    def abort(self, raw: RawGroup) -> None:
        import torch_npu

        torch_npu.npu.stop_device(raw.device.index)
        self._stopped.add(raw.device.index)
        raw.backend.abort_hccl_comm("reinit")


_BACKENDS: dict[str, type[Backend]] = {"cpu": Gloo, "cuda": Nccl, "npu": Hccl}


def best_device() -> str:
    """The kind of device that a script without a word about it means. A torch that was built for CUDA may be on a
    machine without any, which `torch.accelerator` does not look at (and older versions lack)."""
    for kind in ("npu", "cuda"):
        if hasattr(torch, kind) and getattr(torch, kind).is_available():
            return kind
    return "cpu"


def pick(device_type: str) -> Backend:
    """The library for a kind of device. Raises ValueError or RuntimeError with what is missing."""
    if device_type not in _BACKENDS:
        raise ValueError(
            f"there is no collective library for devices of type {device_type!r}; "
            f"models may be on {', '.join(_BACKENDS)}"
        )
    chosen = _BACKENDS[device_type]
    available = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "hccl": lambda: hasattr(torch, "npu"),
    }[chosen.name]
    if not available():
        raise RuntimeError(
            f"the model is on {device_type!r}, which needs {chosen.name}, but this torch {torch.__version__} "
            f"was built without it{' (import torch_npu first)' if chosen is Hccl else ''}"
        )
    return chosen()
