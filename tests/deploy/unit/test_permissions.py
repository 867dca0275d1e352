"""Who may do what: the Roles of deploy/ grant what each part asks for, no more and no less.

ASKED is the list. It is held against three things: the Roles; the requests in the source, found by reading it, so that
nothing is granted that no line asks for; and, in every test in which one of the parts runs, what it really asks for,
and in which namespace (tests/conftest.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from evertrain import aio
from evertrain.kube import port
from evertrain.kube.cache import Cache
from evertrain.noded.sources import Sources
from evertrain.operator.shell import Operator
from tests import requests_asked
from tests.deploy.deployed import OVERLAYS, ROOT, kustomized
from tests.kube.fake import FakeKube
from tests.requests_asked import ASKED, EVERYWHERE, NEVER_ASKED, Recording, Request

SOURCE = ROOT / "src" / "evertrain"
ACCOUNTS = {
    "operator": "ascend-operator",
    "clusterd": "clusterd",
    "noded": "noded",
    "credentials": "evertrain-credentials",
}
LEASES = {Request(verb, "leases.coordination.k8s.io", "mindx-dl") for verb in ("get", "create", "update")}
KINDS = {name: kind for name, kind in vars(port).items() if isinstance(kind, port.Kind)}
VERBS = {"replace": "update", "replace_status": "update"} | {
    verb: verb for verb in ("get", "list", "watch", "create", "patch", "delete")
}


def granted(part: str, folder: str = "base") -> set[Request]:
    found = set()
    items = kustomized(folder)
    for (kind, namespace, _), binding in items.items():
        if kind not in ("RoleBinding", "ClusterRoleBinding"):
            continue
        if any(subject["name"] == ACCOUNTS[part] for subject in binding["subjects"]):
            role = items[binding["roleRef"]["kind"], namespace, binding["roleRef"]["name"]]
            for rule in role["rules"]:
                for group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        name = f"{resource}.{group}" if group else resource
                        found |= {Request(verb, name, namespace or EVERYWHERE) for verb in rule["verbs"]}
    return found


@pytest.mark.parametrize("part", ACCOUNTS)
def test_roles_grant_what_is_asked_for(part: str) -> None:
    wanted = ASKED[part] | NEVER_ASKED.get(part, set())
    may = granted(part)
    assert sorted(may - wanted) == [], "granted, and nobody asks for it"
    assert sorted(wanted - may) == [], "asked for, and not granted"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_grant_no_more(overlay: str) -> None:
    for part in ACCOUNTS:
        assert granted(part, f"overlays/{overlay}") <= granted(part)


def test_nobody_may_do_what_is_not_named() -> None:
    for name, item in kustomized("base").items():
        if name[0] in ("Role", "ClusterRole"):
            for rule in item["rules"]:
                assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
                if rule["resources"] in (["leases"], ["secrets"]) and set(rule["verbs"]) & {"get", "update"}:
                    assert rule["resourceNames"], "only those that are its own"


# What the source asks for.


def requests_in(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Verb and resource of each request: kube.get(KIND, …), Cache(kube, KIND, …), and the operator's actions."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        named = [KINDS[each.id] for each in node.args[:2] if isinstance(each, ast.Name) and each.id in KINDS]
        if not named:
            continue
        kind = named[0]
        group = kind.api_version.rpartition("/")[0]
        resource = f"{kind.plural}.{group}" if group else kind.plural
        if isinstance(node.func, ast.Name):
            verbs = {
                "Cache": ("list", "watch"),
                "Create": ("create", "get"),  # get: when the name is taken
                "Delete": ("delete",),
                "_delete": ("delete",),
                "Patch": ("patch",),
            }.get(node.func.id, ())
            yield from ((verb, resource) for verb in verbs)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in VERBS:
            status = any(
                word.arg == "status" and isinstance(word.value, ast.Constant) and word.value.value
                for word in node.keywords
            )
            if node.func.attr == "replace_status" or status:
                resource = resource.replace(kind.plural, f"{kind.plural}/status", 1)
            yield VERBS[node.func.attr], resource


def read(part: str) -> set[tuple[str, str]]:
    paths = [SOURCE / "cli" / "credentials.py"] if part == "credentials" else (SOURCE / part).rglob("*.py")
    found = {request for path in paths for request in requests_in(ast.parse(Path(path).read_text()))}
    # A Secret whose name is taken is the job's own, and is not looked at.
    return found - {("get", "secrets")} if part == "operator" else found


@pytest.mark.parametrize("part", ACCOUNTS)
def test_the_list_is_what_the_source_asks_for(part: str) -> None:
    listed = {(request.verb, request.resource) for request in ASKED[part] - LEASES}
    assert read(part) == listed


def test_who_leads_asks_for_leases() -> None:
    asked = set(requests_in(ast.parse((SOURCE / "kube" / "lease.py").read_text())))
    assert asked == {(request.verb, request.resource) for request in LEASES}
    for part in ("operator", "clusterd"):
        assert ASKED[part] >= LEASES


# What is asked when it runs.


def test_what_is_not_on_the_list_fails_the_test_that_asks_for_it() -> None:
    async def test() -> None:
        kube = Recording(FakeKube(), "noded")
        await kube.list(port.CONFIG_MAP, "kube-system")
        with pytest.raises(AssertionError, match="noded asks for delete configmaps in kube-system"):
            await kube.delete(port.CONFIG_MAP, "x", "kube-system")
        with pytest.raises(AssertionError, match="noded asks for list configmaps in all namespaces"):
            await Cache(kube, port.CONFIG_MAP).refresh()
        with pytest.raises(AssertionError, match="noded asks for update pods/status in default"):
            await kube.replace_status(port.POD, {"metadata": {"name": "x", "namespace": "default"}})
        assert len(requests_asked.unlisted) == 3
        requests_asked.unlisted.clear()

    aio.run(test())


def test_every_part_is_listened_to() -> None:
    fake = FakeKube()
    for cache in (Sources(fake, "node-0").nodes, Operator(fake).observer.jobs):
        assert isinstance(cache._kube, Recording)
