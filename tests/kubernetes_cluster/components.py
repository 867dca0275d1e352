"""Kubernetes 1.20.2 from Debian's source package, and what else a node needs from its binary packages.

Nothing is installed on the machine: packages are unpacked into a cache folder outside of the checkout. It is filled
beside its place and renamed when it is whole, so a cache that is there can be used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = "1.20.2"
RECIPE = 1
"""Goes up when something here is made in another way."""

BUILT = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
GO = "1.19"
REFLECT2 = "golang-github-modern-go-reflect2-dev"
TO_BUILD = (
    f"golang-{GO}-go", f"golang-{GO}-src", REFLECT2,
    "rsync", "libpopt0", "libxxhash0", "jq", "libjq1", "libonig5",
)  # fmt: skip
TO_RUN = (
    "etcd-server", "containerd", "runc", "libseccomp2", "containernetworking-plugins",
    "iptables", "libip4tc2", "libip6tc2", "libxtables12", "libnftnl11", "libmnl0",
    "conntrack", "libnetfilter-conntrack3", "libnfnetlink0",
    "iproute2", "libbpf1", "libelf1", "libbsd0", "libmd0", "libcap2", "libcap2-bin", "libdb5.3", "libtirpc3",
)  # fmt: skip
NEEDS = """\
A Kubernetes for tests is made on Debian 12 (amd64), from Debian's source package: it needs apt-get with a mirror that
has sources, a C compiler, and root to run nodes. {why}
On any other machine give the tests a cluster of your own: KUBECONFIG=... make test-kubernetes\
"""
PAUSE = """\
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int signal) { _exit(0); }
static void reap(int signal) { while (waitpid(-1, 0, WNOHANG) > 0) ; }
int main(void) { signal(SIGTERM, end); signal(SIGINT, end); signal(SIGCHLD, reap); for (;;) pause(); }
"""


class Unsuitable(Exception):
    """This machine can't do it; the text says what it would need."""


def say(text: str) -> None:
    print(f"== {text} ({time.strftime('%H:%M:%S')})", file=sys.stderr, flush=True)


class Components:
    """What is in the cache."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "root"

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    @property
    def plugins(self) -> Path:
        return self.root / "usr" / "lib" / "cni"

    def environment(self) -> dict[str, str]:
        """In which all programs find each other, and their libraries."""
        libraries = [self.root / "usr/lib/x86_64-linux-gnu", self.root / "lib/x86_64-linux-gnu"]
        programs = [self.folder / "bin", *(self.root / each for each in ("usr/bin", "usr/sbin", "bin", "sbin"))]
        return {
            **os.environ,
            "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
            "XTABLES_LIBDIR": str(libraries[0] / "xtables"),
        }


def place() -> Path:
    """Where the cache is, or will be."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "evertrain" / f"kubernetes-{VERSION}-{RECIPE}"


def get() -> Components:
    """From the cache; the first time it takes minutes."""
    folder = place()
    if not folder.exists():
        check()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(f"{folder.name}.lock")):
            if not folder.exists():
                build(folder)
    return Components(folder)


def check() -> None:
    """Can it be built here?"""
    with contextlib.suppress(OSError):
        system = platform.freedesktop_os_release()
        here = f"{system.get('ID')} {system.get('VERSION_ID')} {platform.machine()}"
        if here != "debian 12 x86_64":
            raise Unsuitable(NEEDS.format(why=f"This is {here}."))
    for tool in ("apt-get", "apt-cache", "dpkg", "gcc", "make", "tar"):
        if shutil.which(tool) is None:
            raise Unsuitable(NEEDS.format(why=f"There is no {tool}."))


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(folder: Path) -> None:
    """Anew: what an interrupted one has left is not looked at."""
    part = folder.with_name(f"{folder.name}.part")
    _remove(part)
    (part / "bin").mkdir(parents=True)
    say(f"Kubernetes {VERSION} from Debian's sources, in {part}; some 10 minutes, once")
    apt = Apt(part / "apt")
    apt.update()
    say("packages")
    apt.unpack(TO_RUN, part / "root")
    apt.unpack(TO_BUILD, part / "tools")
    _link(part / "bin", Components(part).root)
    (part / "pause.c").write_text(PAUSE)
    _run("gcc", "-static", "-Os", "-o", part / "bin" / "pause", part / "pause.c")
    source = apt.source("kubernetes", part / "kubernetes")
    _renew_reflect2(source, part / "tools")
    _compile(source, part)
    for name in ("apt", "tools", "kubernetes", "pause.c"):
        _remove(part / name)
    part.rename(folder)
    say(f"it is in {folder}")


class Apt:
    """apt-get with lists and packages in a folder of its own, for the mirrors that the machine uses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("lists/partial", "archives/partial", "packages"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        sources = folder / "sources.list"
        sources.write_text(self._sources())
        self._options = [
            f"-oDir::Etc::sourcelist={sources}", "-oDir::Etc::sourceparts=-", f"-oDir::State::lists={folder / 'lists'}",
            f"-oDir::Cache={folder}", "-oAPT::Sandbox::User=", "-qq",
        ]  # fmt: skip

    @staticmethod
    def _sources() -> str:
        """Sources and packages of all of Debian that the machine knows."""
        known = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)",
             "Created-By: Packages", "Origin: Debian"],
            check=True, capture_output=True, text=True,
        ).stdout.splitlines()  # fmt: skip
        if not known:  # nobody has run `apt-get update`
            known = ["http://deb.debian.org/debian bookworm main"]
        return "".join(f"{kind} {line}\n" for line in dict.fromkeys(known) for kind in ("deb", "deb-src"))

    def update(self) -> None:
        _run("apt-get", *self._options, "update")

    def unpack(self, packages: tuple[str, ...], folder: Path) -> None:
        """Without installing them."""
        downloads = self._folder / "packages" / folder.name
        _remove(downloads)
        downloads.mkdir()
        _run("apt-get", *self._options, "download", *packages, cwd=downloads)
        for package in sorted(downloads.glob("*.deb")):
            _run("dpkg", "-x", package, folder)

    def source(self, package: str, folder: Path) -> Path:
        """Debian's patches are for its way to build it, and are left out."""
        _remove(folder)
        folder.mkdir()
        _run("apt-get", *self._options, "source", "--download-only", package, cwd=folder)
        (archive,) = folder.glob("*.orig.tar.gz")
        (folder / "source").mkdir()
        _run("tar", "-xzf", archive, "-C", folder / "source", "--strip-components=1")
        return folder / "source"


def _link(programs: Path, root: Path) -> None:
    """Debian chooses between variants at installation."""
    for name in ("iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"):
        link = programs / name
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(root / "usr/sbin/xtables-nft-multi", programs))


def _renew_reflect2(source: Path, tools: Path) -> None:
    """The one in the tree is older than Go 1.18: an API server with it dies of the first custom resource."""
    old = source / "vendor/github.com/modern-go/reflect2"
    new = tools / "usr/share/gocode/src/github.com/modern-go/reflect2"
    for pattern in ("*.go", "*.s"):
        for file in old.glob(pattern):
            file.unlink()
        for file in new.glob(pattern):
            shutil.copy(file, old)


def _compile(source: Path, part: Path) -> None:
    """As Debian's rules do; its makefile makes files first that `go build` alone would miss."""
    go = part / "tools" / "usr" / "lib" / f"go-{GO}"
    tree = source / ".go" / "src" / "k8s.io" / "kubernetes"
    tree.parent.mkdir(parents=True, exist_ok=True)
    tree.symlink_to(source)
    environment = {
        **os.environ,
        "GOROOT": str(go), "GOPATH": str(source / ".go"),
        "GO111MODULE": "off", "GOFLAGS": "", "CGO_ENABLED": "0",
        "PATH": f"{go / 'bin'}:{part / 'tools/usr/bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(part / "tools/usr/lib/x86_64-linux-gnu"),
        "KUBE_GIT_VERSION": f"v{VERSION}", "KUBE_GIT_COMMIT": "debian", "KUBE_GIT_TREE_STATE": "archive",
        "KUBE_GIT_MAJOR": "1", "KUBE_GIT_MINOR": "20",
    }  # fmt: skip
    for number, name in enumerate(BUILT, 1):
        say(f"compiling {name}, {number} of {len(BUILT)}")
        _run("make", "GOFLAGS=", f"WHAT=cmd/{name}", cwd=tree, env=environment)
        shutil.copy(source / "_output" / "bin" / name, part / "bin")


def _run(*command: str | Path, **options: Any) -> None:
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-4000:]}")


def _remove(what: Path) -> None:
    if what.is_dir():
        shutil.rmtree(what)
    else:
        what.unlink(missing_ok=True)
