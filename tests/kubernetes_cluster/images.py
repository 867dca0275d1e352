"""Container images made of what is on this machine: no registry, no other distribution.

The image of our parts has this interpreter, what `evertrain[cluster]` needs, and the few programs that scripts need,
with all libraries that these load. A training has torch by hostPath: three copies of a gigabyte take long.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import evertrain

PAUSE = "evertrain.test/pause:1"
IMAGE = f"docker.io/library/evertrain-control-plane:{evertrain.__version__}"
"""As deploy/ names it."""
PROGRAMS = (
    "sh", "bash", "env", "cat", "ls", "sleep", "kill", "grep", "sed", "awk", "date", "hostname", "id", "mkdir", "rm",
    "touch", "head", "tail", "true", "false", "echo", "test", "dirname", "basename", "readlink", "tr", "cut", "sort",
    "wc", "seq",
)  # fmt: skip
LEFT_OUT = re.compile(r"(^|/)(site-packages|test|tests|idlelib|ensurepip|tkinter|lib2to3|turtledemo|share)(/|$)|\.a$")
"""Of an interpreter."""
LOADED = re.compile(r"(?:=> )?(/\S+) \(0x")
SOURCE = Path(__file__).resolve().parents[2] / "src"


def write_pause(program: Path, archive: Path) -> None:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(program, "pause")
    _write(archive, PAUSE, layer.getvalue(), {"Entrypoint": ["/pause"]})


def write_parts(archive: Path) -> None:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        _Root(tar).fill()
    settings = {
        "Env": [f"PATH={sys.prefix}/bin:/usr/bin:/bin", "HOME=/tmp", "PYTHONDONTWRITEBYTECODE=1"],
        "WorkingDir": "/tmp",
        "Entrypoint": [f"{sys.prefix}/bin/python", "-m", "evertrain.cli"],
    }
    _write(archive, IMAGE, layer.getvalue(), settings)


class _Root:
    """The root of a container, as an archive that is being written."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar, self._has = tar, set[str]()

    def fill(self) -> None:
        for folder in ("tmp", "proc", "sys", "dev", "run", "var", "etc", "usr/bin", "usr/lib", "usr/lib64"):
            self._folder(Path("/") / folder)
        for name in ("bin", "lib", "lib64"):
            self._link(Path("/") / name, f"usr/{name}")
        self._text("/etc/passwd", "root:x:0:0::/tmp:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n")
        self._text("/etc/group", "root:x:0:\nnogroup:x:65534:\n")
        self._text("/etc/nsswitch.conf", "hosts: files dns\n")
        programs = [path for name in PROGRAMS if (path := shutil.which(name))]
        for path in programs:
            self._file(Path(os.path.realpath(path)), Path("/usr/bin") / Path(path).name)
        binaries = [Path(os.path.realpath(path)) for path in programs]
        for name in ("python", "python3", Path(sys.executable).resolve().name):
            self._link(Path(sys.prefix) / "bin" / name, os.path.realpath(sys.executable))
        for link in _links(Path(sys.executable)):  # a training has the environment itself, by hostPath
            self._link(link, os.path.realpath(link))
        self._file(Path(sys.prefix) / "pyvenv.cfg", Path(sys.prefix) / "pyvenv.cfg")
        binaries += [Path(os.path.realpath(sys.executable)), *self._tree(Path(sysconfig.get_path("stdlib")))]
        self._file(binaries[len(programs)], binaries[len(programs)])
        for file in _packages("evertrain[cluster]"):
            self._file(file, file)
            binaries += [file] if ".so" in file.suffixes else []
        self._tree(SOURCE / "evertrain", Path(sysconfig.get_path("purelib")) / "evertrain")
        torch = Path(sysconfig.get_path("purelib")) / "torch" / "lib"  # its libraries' libraries: it comes by hostPath
        for library in _loaded([*binaries, *torch.glob("*.so*")]):
            if not library.is_relative_to(sysconfig.get_path("purelib")):
                self._file(Path(os.path.realpath(library)), library)

    def _tree(self, folder: Path, place: Path | None = None) -> list[Path]:
        """All of a folder but what nobody needs in a container; what of it loads libraries."""
        found = []
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if LEFT_OUT.search(str(inside)):
                continue
            target = (place or folder) / inside
            if path.is_symlink():
                self._link(target, os.readlink(path))
            elif path.is_file():
                self._file(path, target)
                if ".so" in path.suffixes:
                    found.append(path)
        return found

    def _folder(self, place: Path) -> None:
        for each in [*reversed(place.parents), place]:
            if str(each) != "/" and str(each) not in self._has:
                entry = tarfile.TarInfo(str(each)[1:])
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if str(each) == "/tmp" else 0o755
                self._tar.addfile(entry)
                self._has.add(str(each))

    def _new(self, place: Path) -> tarfile.TarInfo | None:
        place = Path(re.sub(r"^/(bin|lib|lib64)/", r"/usr/\1/", str(place)))
        if str(place) in self._has:
            return None
        self._folder(place.parent)
        self._has.add(str(place))
        return tarfile.TarInfo(str(place)[1:])

    def _file(self, path: Path, place: Path) -> None:
        entry = self._new(place)
        if entry is not None:
            entry.size = path.stat().st_size
            entry.mode = path.stat().st_mode & 0o777 | 0o444
            with open(path, "rb") as file:
                self._tar.addfile(entry, file)

    def _link(self, place: Path, target: str) -> None:
        if str(place) in ("/bin", "/lib", "/lib64"):
            entry: tarfile.TarInfo | None = tarfile.TarInfo(str(place)[1:])
            self._has.add(str(place))
        else:
            entry = self._new(place)
        if entry is not None:
            entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
            self._tar.addfile(entry)

    def _text(self, place: str, text: str) -> None:
        entry = self._new(Path(place))
        assert entry is not None
        entry.size, entry.mode = len(text), 0o644
        self._tar.addfile(entry, io.BytesIO(text.encode()))


def _links(path: Path) -> Iterable[Path]:
    """On the way to what it is."""
    while path.is_symlink():
        yield path
        path = path.parent / os.readlink(path)


def _packages(*wanted: str) -> list[Path]:
    """Files of these and of all that they need; of what is installed from a checkout none."""
    found, left, seen = [], list(map(Requirement, wanted)), set()
    while left:
        requirement = left.pop()
        key = (canonicalize_name(requirement.name), *sorted(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        package = metadata.distribution(requirement.name)
        for extra in ("", *requirement.extras):
            needs = map(Requirement, package.requires or [])
            left += [each for each in needs if each.marker is None or each.marker.evaluate({"extra": extra})]
        files = [Path(os.path.normpath(str(package.locate_file(file)))) for file in package.files or []]
        files = [file for file in files if file.is_relative_to(sysconfig.get_path("purelib")) and file.is_file()]
        found += [file for file in files if "editable" not in file.name]
    return found


def _loaded(binaries: Iterable[Path]) -> list[Path]:
    """Libraries that the system's loader finds for these."""
    done = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True)
    return sorted({Path(path) for path in LOADED.findall(done.stdout)})


def _write(archive: Path, name: str, layer: bytes, settings: dict[str, object]) -> None:
    """In the format of `docker save`."""
    digest = hashlib.sha256(layer).hexdigest()
    config = json.dumps({
        "architecture": "amd64", "os": "linux", "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }).encode()  # fmt: skip
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    contents = {"config.json": config, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    written = archive.with_suffix(".new")
    with tarfile.open(written, "w") as tar:
        for file, content in contents.items():
            entry = tarfile.TarInfo(file)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    written.rename(archive)
