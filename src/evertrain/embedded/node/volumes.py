"""The volumes of a pod: what they are on this machine, and what of it goes where in a container.

The node writes ConfigMaps, Secrets and the downward API into a directory of the pod, and again when they change, all
files at once: `..data` is a link to a directory with the files of one moment, as the kubelet does it. Volumes of the
machine (hostPath, nfs on this host) are used where they are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evertrain.embedded import resources
from evertrain.embedded.node import environment
from evertrain.embedded.node.environment import ConfigError, Lookup, Place
from evertrain.embedded.node.runtime.mounts import Mount
from evertrain.kube.port import Object

LOCAL_SERVERS = frozenset({"127.0.0.1", "localhost", "::1"})
_LIVE = ("configMap", "secret", "downwardAPI", "projected")
_REFERENCES = {"ConfigMap": ("configMapRef", "configMapKeyRef"), "Secret": ("secretRef", "secretKeyRef")}
_DATA = "..data"


class VolumeError(Exception):
    """FailedMount: the message for the user."""


@dataclass(frozen=True)
class Tmpfs:
    """An emptyDir in memory, which the runtime of the node has to mount."""

    path: Path
    options: str


@dataclass
class Prepared:
    paths: dict[str, Path]
    """By name of the volume: what is to be bound into containers."""
    tmpfs: list[Tmpfs]
    notes: list[str]
    """What the user should know."""
    host_paths: Mapping[str, Path]


def prepare(
    pod: Object, folder: Path, place: Place, lookup: Lookup, host_paths: Mapping[str, Path] | None = None
) -> Prepared:
    """Makes every volume exist. `host_paths`: directories that are elsewhere than a hostPath says."""
    prepared = Prepared({}, [], [], host_paths or {})
    for volume in (pod.get("spec") or {}).get("volumes") or []:
        name = str(volume["name"])
        try:
            prepared.paths[name] = _prepare(pod, volume, folder / name, place, lookup, prepared)
        except (ConfigError, VolumeError) as error:
            raise VolumeError(f'MountVolume.SetUp failed for volume "{name}" : {error}') from None
        except OSError as error:
            raise VolumeError(
                f'MountVolume.SetUp failed for volume "{name}" : {error.filename}: {error.strerror}'
            ) from None
    return prepared


def refresh(pod: Object, folder: Path, place: Place, lookup: Lookup) -> None:
    """Brings volumes up to date whose source has changed. One that is missing now keeps what it has."""
    for volume in (pod.get("spec") or {}).get("volumes") or []:
        if any(volume.get(kind) is not None for kind in _LIVE):
            with contextlib.suppress(ConfigError, VolumeError, OSError):
                _write(folder / volume["name"], _files(pod, volume, place, lookup))


def sources(pod: Object) -> set[tuple[str, str]]:
    """Kind and name of every ConfigMap and Secret that the pod's volumes and environment are made of."""
    spec = pod.get("spec") or {}
    found: set[tuple[str, str]] = set()
    for volume in spec.get("volumes") or []:
        for source in [volume, *((volume.get("projected") or {}).get("sources") or [])]:
            if source.get("configMap"):
                found.add(("ConfigMap", str(source["configMap"].get("name") or "")))
            if secret := source.get("secret"):
                found.add(("Secret", str(secret.get("secretName") or secret.get("name") or "")))
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        references = list(container.get("envFrom") or [])
        references += [variable.get("valueFrom") or {} for variable in container.get("env") or []]
        for reference in references:
            for kind, names in _REFERENCES.items():
                found |= {(kind, str(reference[name].get("name") or "")) for name in names if reference.get(name)}
    return found


def mounts(
    container: Mapping[str, Any], paths: Mapping[str, Path], variables: Mapping[str, str], names: Sequence[Path]
) -> list[Mount]:
    """What is mounted where in a container. `names`: files that take the place of those of the same name in /etc."""
    found = [Mount(source=str(file), target=f"/etc/{file.name}", read_only=False) for file in names]
    for mount in container.get("volumeMounts") or []:
        path = paths.get(str(mount["name"]))
        if path is None:
            raise ConfigError(f"volume {mount['name']} of container {container.get('name')} is not defined")
        below = str(mount.get("subPath") or "")
        if mount.get("subPathExpr"):
            below = environment.expand(str(mount["subPathExpr"]), variables)
        if below:
            if os.path.isabs(below) or ".." in below.split("/"):
                raise ConfigError(f"subPath {below} has to be a path below its volume")
            inner = path / below
            if not inner.exists():
                inner.mkdir(parents=True)
            if not inner.resolve().is_relative_to(path.resolve()):
                raise ConfigError(f"subPath {below} leads out of its volume")
            path = inner
        target = str(mount.get("mountPath") or "")
        if not target.startswith("/"):
            raise ConfigError(f"mountPath {target!r} of container {container.get('name')} has to begin with /")
        found.append(Mount(source=str(path), target=target, read_only=bool(mount.get("readOnly"))))
    return found


def _prepare(
    pod: Object, volume: Mapping[str, Any], own: Path, place: Place, lookup: Lookup, prepared: Prepared
) -> Path:
    if any(volume.get(kind) is not None for kind in _LIVE):
        _write(own, _files(pod, volume, place, lookup))
        return own
    if (host := volume.get("hostPath")) is not None:
        return _host_path(str(host.get("path") or ""), str(host.get("type") or ""), own, prepared)
    if (nfs := volume.get("nfs")) is not None:
        server, path = str(nfs.get("server") or ""), str(nfs.get("path") or "")
        if server not in LOCAL_SERVERS:
            raise VolumeError(
                f"nfs server {server}: this cluster runs on one machine and serves nfs volumes of 127.0.0.1 only, as "
                "directories of the machine"
            )
        if not Path(path).is_dir():
            raise VolumeError(f"nfs path {path} is not a directory of this machine")
        return Path(path)
    kinds = [kind for kind in volume if kind != "name" and volume[kind] is not None]
    if not kinds or volume.get("emptyDir") is not None:
        own.mkdir(parents=True, exist_ok=True)
        empty = volume.get("emptyDir") or {}
        own.chmod(0o777)
        if empty.get("medium") == "Memory":
            limit = empty.get("sizeLimit")
            size = f",size={resources.thousandths(limit) // 1000}" if limit else ""
            prepared.tmpfs.append(Tmpfs(own, f"mode=1777{size}"))
        return own
    raise VolumeError(f"volumes of type {kinds[0]} are not supported here")


def _host_path(path: str, kind: str, own: Path, prepared: Prepared) -> Path:
    if not path.startswith("/"):
        raise VolumeError(f"hostPath {path!r} has to begin with /")
    there = _relocated(path, prepared.host_paths)
    tests: dict[str, tuple[Callable[[], bool], str]] = {
        "Directory": (there.is_dir, "a directory"),
        "File": (there.is_file, "a file"),
        "Socket": (there.is_socket, "a socket file"),
        "CharDevice": (there.is_char_device, "a character device"),
        "BlockDevice": (there.is_block_device, "a block device"),
    }
    if kind == "DirectoryOrCreate":
        there.mkdir(mode=0o755, parents=True, exist_ok=True)
    elif kind == "FileOrCreate" and not there.exists():
        there.touch(mode=0o644)
    elif kind in tests and not tests[kind][0]():
        raise VolumeError(f"hostPath type check failed: {path} is not {tests[kind][1]}")
    elif not there.exists():
        own.mkdir(parents=True, exist_ok=True)
        prepared.notes.append(f"{path} does not exist on this machine: the pod sees an empty directory in its place")
        return own
    return there


def _relocated(path: str, host_paths: Mapping[str, Path]) -> Path:
    for prefix, elsewhere in host_paths.items():
        below = os.path.relpath(path, prefix)
        if below == "." or not below.startswith(".."):
            there = elsewhere / below
            there.mkdir(parents=True, exist_ok=True)
            return there
    return Path(path)


Files = dict[str, tuple[bytes, int]]
"""Content and mode by relative path."""


def _files(pod: Object, volume: Mapping[str, Any], place: Place, lookup: Lookup) -> Files:
    namespace = pod["metadata"].get("namespace", "")
    if (source := volume.get("projected")) is not None:
        mode = source.get("defaultMode")
        found: Files = {}
        for part in source.get("sources") or []:
            for kind, field in (("ConfigMap", "configMap"), ("Secret", "secret")):
                if part.get(field) is not None:
                    given = part[field]
                    found |= _keys(kind, str(given.get("name") or ""), given, mode, namespace, lookup)
            if part.get("downwardAPI") is not None:
                found |= _downward(pod, part["downwardAPI"], mode, place)
            if part.get("serviceAccountToken") is not None:
                raise VolumeError("service account tokens are not supported here")
        return found
    if (source := volume.get("configMap")) is not None:
        return _keys("ConfigMap", str(source.get("name") or ""), source, source.get("defaultMode"), namespace, lookup)
    if (source := volume.get("secret")) is not None:
        name = str(source.get("secretName") or "")
        return _keys("Secret", name, source, source.get("defaultMode"), namespace, lookup)
    source = volume["downwardAPI"]
    return _downward(pod, source, source.get("defaultMode"), place)


def _keys(kind: str, name: str, source: Mapping[str, Any], mode: int | None, namespace: str, lookup: Lookup) -> Files:
    default = 0o644 if mode is None else int(mode)
    item = lookup(kind, namespace, name)
    if item is None:
        if source.get("optional"):
            return {}
        raise VolumeError(f'{kind.lower()} "{name}" not found')
    content = environment.content(kind, item)
    chosen: Sequence[Mapping[str, Any]] | None = source.get("items")
    if not chosen:
        return {key: (data, default) for key, data in content.items()}
    found: Files = {}
    for entry in chosen:
        key, path = str(entry.get("key") or ""), _inside(str(entry.get("path") or ""))
        if key not in content:
            if source.get("optional"):
                continue
            raise VolumeError(f"references non-existent {kind.lower()} key: {key}")
        found[path] = (content[key], default if entry.get("mode") is None else int(entry["mode"]))
    return found


def _downward(pod: Object, source: Mapping[str, Any], mode: int | None, place: Place) -> Files:
    default = 0o644 if mode is None else int(mode)
    found: Files = {}
    for entry in source.get("items") or []:
        if reference := entry.get("resourceFieldRef"):
            container = environment.container_named(pod, str(reference.get("containerName") or ""))
            text = environment.resource(container, reference, place)
        else:
            text = environment.field(pod, str((entry.get("fieldRef") or {}).get("fieldPath") or ""), place)
        given = entry.get("mode")
        found[_inside(str(entry.get("path") or ""))] = (text.encode(), default if given is None else int(given))
    return found


def _inside(path: str) -> str:
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts or parts[0].startswith(".."):
        raise VolumeError(f"{path!r} is no path inside a volume")
    return os.path.normpath(path)


def _write(own: Path, files: Files) -> None:
    own.mkdir(parents=True, exist_ok=True)
    old = own / os.readlink(own / _DATA) if (own / _DATA).is_symlink() else None
    if old is not None and _read(old) == files:
        return
    moment = f"..{time.time_ns()}"
    for path, (data, mode) in files.items():
        file = own / moment / path
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            os.fchmod(descriptor, mode & 0o777)
    (own / moment).mkdir(exist_ok=True)
    (own / "..next").unlink(missing_ok=True)  # of a cluster that was killed right here
    os.symlink(moment, own / "..next")
    os.replace(own / "..next", own / _DATA)
    tops = {path.split("/")[0] for path in files}
    for top in tops:
        if not (own / top).is_symlink():
            os.symlink(f"{_DATA}/{top}", own / top)
    for entry in list(own.iterdir()):
        if not entry.name.startswith(".."):
            if entry.is_symlink() and entry.name not in tops:
                entry.unlink()
        elif entry.name not in (_DATA, moment):
            shutil.rmtree(entry, ignore_errors=True)


def _read(folder: Path) -> Files:
    return {
        str(file.relative_to(folder)): (file.read_bytes(), file.stat().st_mode & 0o777)
        for file in folder.rglob("*")
        if file.is_file()
    }
