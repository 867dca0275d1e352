"""Server-side apply: who owns a field, who may change it, and what happens when nobody gives it any more."""

from __future__ import annotations

import copy
import json
from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.embedded.schema import Refused, Registry, Resource, applied, prepare_create, prepare_update, tracked
from evertrain.embedded.schema import fieldsets as sets
from evertrain.embedded.schema.apply import compare
from evertrain.embedded.schema.managers import read

REGISTRY = Registry.builtin()
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
LATER = datetime(2026, 1, 2, 3, 5, 5, tzinfo=timezone.utc)


def kind(plural: str) -> Resource:
    found = REGISTRY.find("", "v1", plural)
    assert found is not None
    return found


MAPS, PODS = kind("configmaps"), kind("pods")


def config(**data: str) -> dict[str, Any]:
    made: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "d"}}
    return {**made, "data": data} if data else made


def apply(old: dict[str, Any] | None, patch: dict[str, Any], manager: str = "one", **options: Any) -> dict[str, Any]:
    before = copy.deepcopy(old)
    resource = {"ConfigMap": MAPS, "Pod": PODS}[patch["kind"]]
    made = applied(resource, old, patch, manager=manager, now=options.pop("now", NOW), **options)
    assert old == before
    return made


def owners(item: dict[str, Any]) -> dict[str, set[str]]:
    return {entry.manager.name: {sets.shown(path) for path in entry.fields} for entry in read(item)}


def test_the_first_apply_owns_what_it_gives() -> None:
    made = apply(None, {**config(a="1"), "metadata": {"name": "c", "namespace": "d", "labels": {"x": "y"}}})
    assert made["metadata"]["managedFields"] == [
        {
            "manager": "one",
            "operation": "Apply",
            "apiVersion": "v1",
            "time": "2026-01-02T03:04:05Z",
            "fieldsType": "FieldsV1",
            "fieldsV1": {"f:data": {"f:a": {}}, "f:metadata": {"f:labels": {"f:x": {}}}},
        }
    ]


def test_what_is_left_out_next_time_goes_away() -> None:
    made = apply(apply(None, config(a="1", b="2")), config(b="3"))
    assert made["data"] == {"b": "3"}
    made = apply(made, config())
    assert "data" not in made


def test_what_others_own_stays_when_one_lets_go() -> None:
    both = apply(apply(None, config(a="1", b="2")), config(a="1"), manager="two")
    made = apply(both, config(b="2"))
    assert made["data"] == {"a": "1", "b": "2"}
    assert owners(made) == {"one": {".data.b"}, "two": {".data.a"}}


def test_a_conflict_names_every_field_and_its_manager() -> None:
    old = apply(None, config(a="1", b="2"))
    with pytest.raises(Refused) as caught:
        apply(old, config(a="9"), manager="two")
    assert (caught.value.code, caught.value.reason) == (409, "Conflict")
    assert caught.value.message == 'Apply failed with 1 conflict: conflict with "one": .data.a'
    assert caught.value.details["causes"] == [
        {"reason": "FieldManagerConflict", "message": 'conflict with "one"', "field": ".data.a"}
    ]
    old = tracked(MAPS, old, {**old, "data": {"a": "1", "b": "3"}}, manager="three", now=NOW, subresource="")
    with pytest.raises(Refused) as caught:
        apply(old, config(a="9", b="9"), manager="two")
    assert caught.value.message == (
        'Apply failed with 2 conflicts: conflicts with "one":\n- .data.a\n'
        'conflicts with "three" using v1 at 2026-01-02T03:04:05Z:\n- .data.b'
    )


def test_force_takes_the_fields() -> None:
    made = apply(apply(None, config(a="1", b="2")), config(a="9"), manager="two", force=True)
    assert made["data"] == {"a": "9", "b": "2"}
    assert owners(made) == {"one": {".data.b"}, "two": {".data.a"}}


def test_the_same_value_is_shared_without_conflict() -> None:
    made = apply(apply(None, config(a="1")), config(a="1"), manager="two")
    assert owners(made) == {"one": {".data.a"}, "two": {".data.a"}}


def test_applying_the_same_again_changes_nothing() -> None:
    old = apply(None, config(a="1"))
    assert apply(old, config(a="1"), now=LATER) == old


def pod(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "d"},
        "spec": {"containers": list(containers), **spec},
    }


def test_lists_of_objects_are_owned_by_item() -> None:
    old = apply(None, pod({"name": "a", "image": "1", "ports": [{"containerPort": 80}]}))
    assert '.spec.containers[name="a"].ports[containerPort=80,protocol="TCP"].containerPort' in owners(old)["one"]
    both = apply(old, pod({"name": "b", "image": "2"}), manager="two")
    assert [container["name"] for container in both["spec"]["containers"]] == ["a", "b"]
    made = apply(both, pod({"name": "b", "image": "2"}))
    assert [container["name"] for container in made["spec"]["containers"]] == ["b"]


def test_an_item_that_others_use_stays_with_its_key() -> None:
    old = apply(None, pod({"name": "a", "image": "1", "workingDir": "/x"}))
    both = apply(old, pod({"name": "a", "image": "1"}), manager="two")
    made = apply(both, pod({"name": "z", "image": "2"}))
    assert made["spec"]["containers"] == [{"name": "a", "image": "1"}, {"name": "z", "image": "2"}]


def test_defaults_belong_to_nobody_and_go_with_their_item() -> None:
    old = prepare_create(PODS, apply(None, pod({"name": "a", "image": "1"}, {"name": "b", "image": "2"}))).object
    assert owners(old) == {
        "one": {
            '.spec.containers[name="a"]',
            '.spec.containers[name="a"].name',
            '.spec.containers[name="a"].image',
            '.spec.containers[name="b"]',
            '.spec.containers[name="b"].name',
            '.spec.containers[name="b"].image',
        }
    }
    made = apply(old, pod({"name": "b", "image": "2"}))
    assert [container["name"] for container in made["spec"]["containers"]] == ["b"]
    assert made["spec"]["containers"][0]["imagePullPolicy"] == "Always"


def test_numbers_and_texts_of_a_quantity_are_the_same() -> None:
    limits = {"name": "a", "image": "1", "resources": {"limits": {"cpu": 1}}}
    old = prepare_create(PODS, apply(None, pod(limits))).object
    assert prepare_update(PODS, apply(old, pod(limits), now=LATER), old).object == old


def test_atomic_lists_have_one_owner() -> None:
    old = apply(None, pod({"name": "a", "command": ["x"]}))
    with pytest.raises(Refused, match=r'conflict with "one": .spec.containers\[name="a"\].command'):
        apply(old, pod({"name": "a", "command": ["y"]}), manager="two")


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (
            {**config(), "foo": 1},
            r"failed to create typed patch object \(d/c; v1, Kind=ConfigMap\): .foo: field not decl",
        ),
        ({**config(), "metadata": {"name": "c", "managedFields": [{"manager": "x"}]}}, "managedFields must be nil"),
        ({**config(), "apiVersion": "v2"}, "must have apiVersion v1"),
        (pod({"name": "a", "image": 1}), r'.spec.containers\[0\].image: expected string, got "integer"'),
        (pod({"name": "a"}, {"name": "a"}), r'.spec.containers: duplicate entries for key \[name="a"\]'),
    ],
)
def test_what_cannot_be_applied(patch: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message) as caught:
        apply(None, {**patch, "metadata": {"namespace": "d", **patch["metadata"]}})
    assert caught.value.code == 400
    with pytest.raises(Refused, match="fieldManager: Required value"):
        applied(MAPS, None, config(), manager="", now=NOW)


# --- writes of other kinds --------------------------------------------------------------------------------------


def test_an_update_owns_what_it_changes() -> None:
    old = tracked(MAPS, None, config(a="1", b="2"), manager="creator", now=NOW)
    new = tracked(MAPS, old, {**old, "data": {"a": "1", "b": "3", "c": "4"}}, manager="editor", now=LATER)
    assert owners(new) == {"creator": {".data", ".data.a"} - {".data"}, "editor": {".data.b", ".data.c"}}
    gone = tracked(MAPS, new, {**new, "data": {"b": "3"}}, manager="remover", now=LATER)
    assert owners(gone) == {"editor": {".data.b"}}
    assert tracked(MAPS, gone, gone, manager="nobody", now=LATER) == gone


def test_a_client_that_knows_no_managed_fields_does_not_lose_them() -> None:
    old = tracked(MAPS, None, config(a="1"), manager="creator", now=NOW)
    plain = {**config(a="1"), "metadata": {"name": "c", "namespace": "d", "labels": {"x": "y"}}}
    new = tracked(MAPS, old, plain, manager="old-client", now=LATER)
    assert owners(new) == {"creator": {".data.a"}, "old-client": {".metadata.labels.x"}}


def test_status_is_owned_by_its_own_door() -> None:
    old = tracked(PODS, None, prepare_create(PODS, pod({"name": "a", "image": "x"})).object, manager="m", now=NOW)
    assert not any(field.startswith(".status") for field in owners(old)["m"])
    new = tracked(PODS, old, {**old, "status": {"phase": "Running"}}, manager="node", now=NOW, subresource="status")
    entry = new["metadata"]["managedFields"][-1]
    assert (entry["manager"], entry["subresource"]) == ("node", "status")
    assert entry["fieldsV1"] == {"f:status": {"f:phase": {}}}


def test_many_managers_are_put_together() -> None:
    item = tracked(MAPS, None, config(a="0"), manager="m", now=NOW)
    for number in range(30):
        item = tracked(MAPS, item, {**item, "data": {**item["data"], f"k{number}": "1"}}, manager=f"m{number}", now=NOW)
    assert len(item["metadata"]["managedFields"]) == 10
    assert set.union(*owners(item).values()) == {".data.a", *(f".data.k{number}" for number in range(30))}


def test_leases_and_events_are_not_tracked() -> None:
    leases = REGISTRY.find("coordination.k8s.io", "v1", "leases")
    assert leases is not None
    item = {"metadata": {"name": "l"}, "spec": {"holderIdentity": "x"}}
    assert tracked(leases, None, item, manager="m", now=NOW) == item


# --- coming from kubectl apply of the client's side -------------------------------------------------------------


def client_side(**data: str) -> dict[str, Any]:
    item = config(**data)
    item["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": json.dumps(config(**data))}
    return tracked(MAPS, None, item, manager="kubectl-client-side-apply", now=NOW)


def test_kubectl_takes_over_what_it_applied_before() -> None:
    made = apply(client_side(a="1"), config(a="2"), manager="kubectl")
    assert made["data"] == {"a": "2"}
    last = made["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"]
    assert json.loads(last)["data"] == {"a": "2"}
    with pytest.raises(
        Refused, match='conflict with "kubectl-client-side-apply" using v1 at 2026-01-02T03:04:05Z: .data.a'
    ):
        apply(client_side(a="1"), config(a="2"), manager="other")


def test_kubectl_does_not_take_over_what_others_changed_since() -> None:
    old = client_side(a="1")
    changed = tracked(MAPS, old, {**old, "data": {"a": "5"}}, manager="editor", now=LATER)
    with pytest.raises(Refused, match='conflict with "editor"'):
        apply(changed, config(a="2"), manager="kubectl")


def test_kubectl_may_rewrite_the_managers_itself() -> None:
    """kubectl hands the fields of its client-side manager to the one that applies, by a JSON patch."""
    old = client_side(a="1")
    entry = {**old["metadata"]["managedFields"][0], "manager": "kubectl", "operation": "Apply"}
    sent = {**old, "metadata": {**old["metadata"], "managedFields": [entry]}}
    new = tracked(MAPS, old, sent, manager="kubectl", now=LATER)
    assert [(e["manager"], e["operation"]) for e in new["metadata"]["managedFields"]] == [("kubectl", "Apply")]
    made = apply(new, config(b="1"), manager="kubectl")
    assert made["data"] == {"b": "1"}
    reset = tracked(MAPS, new, {**new, "metadata": {**new["metadata"], "managedFields": [{}]}}, manager="k", now=LATER)
    assert "managedFields" not in reset["metadata"]


def test_an_object_from_before_managed_fields_is_protected() -> None:
    with pytest.raises(Refused, match='conflict with "before-first-apply" using v1'):
        apply(config(a="1"), config(a="2"))
    made = apply(config(a="1"), config(a="1", b="2"))
    assert owners(made) == {"before-first-apply": {".data.a"}, "one": {".data.a", ".data.b"}}


# --- properties -------------------------------------------------------------------------------------------------

_KEY = st.sampled_from("abc")
_CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {"name": _KEY},
        optional={
            "image": _KEY,
            "command": st.lists(_KEY, max_size=2),
            "env": st.lists(
                st.fixed_dictionaries({"name": _KEY}, optional={"value": _KEY}),
                max_size=2,
                unique_by=lambda v: v["name"],
            ),
        },
    ),
    max_size=3,
    unique_by=lambda container: container["name"],
)
_APPLIED = st.builds(
    lambda containers, labels, finalizers: {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "d", "labels": labels, "finalizers": finalizers},
        "spec": {"containers": containers},
    },
    _CONTAINERS,
    st.dictionaries(_KEY, _KEY, max_size=3),
    st.lists(_KEY, max_size=2, unique=True),
)


def holds(item: Any, patch: Any) -> bool:
    """Whether all that was applied is there."""
    if isinstance(patch, dict):
        return isinstance(item, dict) and all(key in item and holds(item[key], value) for key, value in patch.items())
    if isinstance(patch, list) and patch and isinstance(patch[0], dict):
        named = {entry["name"]: entry for entry in item}
        return all(entry["name"] in named and holds(named[entry["name"]], entry) for entry in patch)
    if isinstance(patch, list):
        return all(entry in item for entry in patch)
    return bool(item == patch)


def content(item: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(item)
    made["metadata"].pop("managedFields", None)
    return made


@settings(max_examples=80, deadline=None)
@given(_APPLIED, _APPLIED)
def test_alone_the_object_is_what_was_applied_last(first: dict[str, Any], second: dict[str, Any]) -> None:
    direct = apply(None, second)
    made = apply(apply(None, first), second)
    assert holds(content(made), content(second))
    assert sets.fields_of(PODS, content(made)) - sets.fields_of(PODS, content(direct)) == frozenset()
    assert apply(made, second, now=LATER) == made


@settings(max_examples=80, deadline=None)
@given(_APPLIED, _APPLIED, _APPLIED)
def test_force_always_gives_what_was_asked_and_never_drops_anothers(
    first: dict[str, Any], other: dict[str, Any], second: dict[str, Any]
) -> None:
    both = apply(apply(None, first), other, manager="other", force=True)
    assert holds(content(both), content(other))
    made = apply(both, second, force=True)
    assert holds(content(made), content(second))
    fields = sets.fields_of(PODS, content(made))
    places = {path[:length] for path in fields for length in range(1, len(path) + 1)}
    for entry in read(made):
        assert entry.fields <= places, "a manager owns only what is there"
    changed, gone = compare(PODS, both, made)
    before, after = owned(both, "other"), owned(made, "other")
    assert before - changed - gone == after


def owned(item: dict[str, Any], manager: str) -> sets.Fields:
    return frozenset().union(*(entry.fields for entry in read(item) if entry.manager.name == manager))


@given(_APPLIED)
def test_field_sets_survive_their_encoding(item: dict[str, Any]) -> None:
    fields = sets.fields_of(PODS, item)
    assert sets.decode(json.loads(json.dumps(sets.encode(fields)))) == fields


@settings(deadline=None)
@given(_APPLIED, _APPLIED)
def test_an_update_owns_exactly_the_difference(first: dict[str, Any], second: dict[str, Any]) -> None:
    old = tracked(PODS, None, first, manager="a", now=NOW)
    new = tracked(PODS, old, second, manager="b", now=LATER)
    everything = frozenset().union(*(entry.fields for entry in read(new)))
    assert everything == sets.fields_of(PODS, second) - {
        path
        for path in sets.fields_of(PODS, second)
        if path[:2] in (("f:metadata", "f:name"), ("f:metadata", "f:namespace"))
    } - {("f:apiVersion",), ("f:kind",), ("f:metadata",)}


def test_an_apply_that_cannot_be_tells_all_that_is_wrong() -> None:
    bad: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "d"},
        "spec": {"foo": 1, "priority": "high", "containers": [{"name": "a", "imagee": "i"}]},
    }
    with pytest.raises(Refused) as caught:
        apply(None, bad)
    assert caught.value.message == (
        "failed to create typed patch object (d/p; v1, Kind=Pod): errors:\n"
        "  .spec.foo: field not declared in schema\n"
        "  .spec.containers[0].imagee: field not declared in schema\n"
        '  .spec.priority: expected integer, got "string"'
    )


def test_managers_together_make_no_object_that_is_too_large() -> None:
    made = apply(None, config(a="x" * (2 << 20)))
    with pytest.raises(Refused, match="Request entity too large") as caught:
        apply(made, config(b="x" * (2 << 20)), "other")
    assert caught.value.code == 413
