"""What each part asks of the Kubernetes API: verb, resource and where.

The Roles in deploy/ are held against this list (tests/deploy/unit/test_permissions.py), and so is what the parts ask
for in every test in which they run (`listening`, which tests/conftest.py does).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from evertrain.kube.port import Kind

EVERYWHERE = "*"


class Request(NamedTuple):
    verb: str
    resource: str
    """With its group, as kubectl writes it."""
    namespace: str
    """EVERYWHERE: in all of them, or of a kind that has none."""


def _requests(namespace: str, **verbs: str) -> set[Request]:
    resources = {
        "ascendjobs": "ascendjobs.mindxdl.gitee.com",
        "ascendjobs_status": "ascendjobs/status.mindxdl.gitee.com",
        "ascendjobs_finalizers": "ascendjobs/finalizers.mindxdl.gitee.com",
        "podgroups": "podgroups.scheduling.volcano.sh",
        "queues": "queues.scheduling.volcano.sh",
        "leases": "leases.coordination.k8s.io",
    }
    return {
        Request(verb, resources.get(name, name), namespace) for name, text in verbs.items() for verb in text.split()
    }


ASKED: dict[str, set[Request]] = {
    "operator": _requests(
        EVERYWHERE,
        ascendjobs="list watch delete",
        ascendjobs_status="update",
        pods="get list watch create patch delete",
        services="get list watch create delete",
        configmaps="get patch",
        secrets="create",
        events="get create patch",
        podgroups="get list watch create patch delete",
        queues="get list watch",
    )
    | _requests("mindx-dl", leases="get create update"),
    "clusterd": _requests(
        EVERYWHERE,
        ascendjobs="list watch patch",
        pods="list watch patch delete",
        nodes="list watch patch",
        configmaps="get list watch create update patch delete",
        events="create patch",
        namespaces="get",
        podgroups="list watch patch",
    )
    | _requests("mindx-dl", leases="get create update"),
    "noded": _requests(EVERYWHERE, nodes="list watch", pods="list watch")
    | _requests("mindx-dl", configmaps="get list watch create patch delete")
    | _requests("kube-system", configmaps="get list watch create patch", events="create patch"),
    "credentials": _requests("mindx-dl", secrets="get create update"),
}
NEVER_ASKED = {"operator": _requests(EVERYWHERE, ascendjobs_finalizers="update")}
"""Granted all the same: the admission plugin OwnerReferencesPermissionEnforcement looks for it."""


WHERE_NOBODY_INSTALLED = {"clusterd": _requests(EVERYWHERE, namespaces="create")}
"""Asked for only where what deploy/ makes is missing, and then done without."""
PARTS = (
    ("operator", "evertrain.operator.shell", "Operator"),
    ("clusterd", "evertrain.clusterd.shell", "ClusterD"),
    ("noded", "evertrain.noded.sources", "Sources"),
    ("noded", "evertrain.noded.daemon", "NodeDaemon"),
)
VERBS = {"replace": "update", "replace_status": "update"} | {
    verb: verb for verb in ("get", "list", "watch", "create", "patch", "delete")
}

unlisted: list[str] = []
"""What the test that runs has been told of: a part may go on in spite of an error."""


class Recording:
    """The API for one of the parts: passes every request on that is on its list, and fails the test for any other."""

    def __init__(self, kube: Any, part: str) -> None:
        self._kube, self._part = kube, part

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kube, name)
        if name not in VERBS:
            return found

        def ask(kind: Kind, *arguments: Any, **options: Any) -> Any:
            group = kind.api_version.rpartition("/")[0]
            status = "/status" if name == "replace_status" or options.get("status") else ""
            resource = f"{kind.plural}{status}.{group}" if group else kind.plural + status
            self._check(Request(VERBS[name], resource, _namespace(name, kind, arguments, options)))
            return found(kind, *arguments, **options)

        return ask

    def _check(self, request: Request) -> None:
        listed = ASKED[self._part] | WHERE_NOBODY_INSTALLED.get(self._part, set())
        if request not in listed and request._replace(namespace=EVERYWHERE) not in listed:
            where = "all namespaces" if request.namespace == EVERYWHERE else request.namespace
            text = f"{self._part} asks for {request.verb} {request.resource} in {where}"
            unlisted.append(f"{text}, which is not listed in tests/requests_asked.py")
            raise AssertionError(unlisted[-1])


def _namespace(verb: str, kind: Kind, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    if not kind.namespaced:
        return EVERYWHERE
    if verb in ("create", "replace", "replace_status"):
        return str(arguments[0]["metadata"].get("namespace") or EVERYWHERE)
    place = 0 if verb in ("list", "watch") else 1
    found = arguments[place] if len(arguments) > place else options.get("namespace")
    return found or EVERYWHERE


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Every operator, ClusterD and noded that is made meanwhile has its requests looked at. Those of modules that no
    test has imported are left alone: nothing is loaded for this."""
    with pytest.MonkeyPatch.context() as patch:
        for part, module, name in PARTS:
            made = getattr(sys.modules.get(module), name, None)
            if made is not None:
                patch.setattr(made, "__init__", _with_recording(made.__init__, part))
        yield


def _with_recording(original: Any, part: str) -> Any:
    @functools.wraps(original)
    def init(self: Any, kube: Any, *arguments: Any, **options: Any) -> None:
        original(self, Recording(kube, part), *arguments, **options)

    return init
