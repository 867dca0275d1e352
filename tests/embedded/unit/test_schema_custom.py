"""Custom resources and their definitions: what they get, what they lose, and what is refused in which words."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from evertrain.embedded.schema import (
    Refused,
    Registry,
    Resource,
    converted,
    prepare_create,
    prepare_update,
)
from evertrain.embedded.schema.definitions import version_rank
from tests.embedded.toys import definition

REGISTRY = Registry.builtin()


def refused(resource: Resource, item: dict[str, Any], **options: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        prepare_create(resource, item, **options)
    return caught.value


DEFINITION = definition(size_required=True)
DEFINITION["spec"]["versions"].append(
    {**DEFINITION["spec"]["versions"][0], "name": "v1alpha1", "storage": False, "deprecated": True}
)
CRD = REGISTRY.find("apiextensions.k8s.io", "v1", "customresourcedefinitions")


def toys() -> Resource:
    assert CRD is not None
    registry = Registry.builtin()
    registry.add_definition(prepare_create(CRD, DEFINITION, field_validation="Strict").object)
    found = registry.find("example.com", "v1", "toys")
    assert found is not None
    return found


def toy(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "t", "namespace": "d"}, "spec": {"size": 3, **spec}}


def with_spec(schema: Any) -> dict[str, Any]:
    made = definition()
    made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"] = schema
    return made


def test_a_definition_makes_a_kind_and_takes_it_away() -> None:
    assert CRD is not None
    registry = Registry.builtin()
    before = registry.revision
    registry.add_definition(prepare_create(CRD, DEFINITION).object)
    assert registry.revision > before
    assert registry.groups()["example.com"] == ["v1", "v1alpha1"]
    found = registry.of({"apiVersion": "example.com/v1", "kind": "Toy"})
    assert found is not None and found.short_names == ("ty",) and found.list_kind == "ToyList" and found.has_status
    smaller = copy.deepcopy(DEFINITION)
    smaller["spec"]["versions"].pop()
    registry.add_definition(prepare_create(CRD, smaller).object)
    assert registry.find("example.com", "v1alpha1", "toys") is None
    registry.remove_definition("toys.example.com")
    assert "example.com" not in registry.groups()


def test_custom_resources_get_defaults_and_lose_unknown_fields() -> None:
    item = toy(free={"a": {"b": 1}}, items=[{"name": "x"}], labels={"k": "v"}, color=None, foo=1)
    ready = prepare_create(toys(), item)
    assert ready.warnings == ['unknown field "spec.foo"']
    assert ready.object["spec"] == {
        "size": 3,
        "free": {"a": {"b": 1}},
        "items": [{"name": "x", "value": 1}],
        "labels": {"k": "v"},
        "color": "red",
        "deep": {"a": 7},
    }
    assert ready.object["metadata"]["generation"] == 1
    empty = toy(
        port=None, deep=None, labels={"a": None, "b": "c"}, items=[{"name": "x", "value": None}], free={"a": None}
    )
    assert prepare_create(toys(), {**empty, "status": None}).object["spec"] == {
        "size": 3,
        "color": "red",
        "deep": {"a": 7},
        "labels": {"b": "c"},
        "items": [{"name": "x", "value": 1}],
        "free": {"a": None},
    }, "a field with nothing behind its colon is not given"
    error = refused(toys(), toy(foo=1, items=[{"name": "x", "bar": 2}]), field_validation="Strict")
    assert error.message == (
        'Toy in version "v1" cannot be handled as a Toy: strict decoding error: unknown field "spec.foo", '
        'unknown field "spec.items[0].bar"'
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"size": "big"}, 'spec.size: Invalid value: "string": spec.size in body must be of type integer: "string"'),
        ({"size": 0}, "spec.size: Invalid value: 0: spec.size in body should be greater than or equal to 1"),
        ({"size": 10}, "spec.size: Invalid value: 10: spec.size in body should be less than or equal to 9"),
        ({"size": None}, "spec.size: Required value"),
        ({"items": [None]}, 'spec.items[0] in body must be of type object: "null"'),
        ({"size": True}, 'must be of type integer: "boolean"'),
        ({"color": "green"}, 'spec.color: Unsupported value: "green": supported values: "red", "blue"'),
        ({"port": True}, "must be of type integer,string"),
        ({"note": "x"}, "spec.note: Invalid value: \"x\": spec.note in body should match '^n'"),
        ({"note": "nnnnn"}, "spec.note: Too long: may not be more than 4 bytes"),
        ({"when": "today"}, 'spec.when in body must be of type date-time: "today"'),
        ({"items": [{"name": "a"}, {"name": "a"}]}, 'spec.items[1]: Duplicate value: {"name": "a"}'),
        ({"items": [{}]}, "spec.items[0].name: Required value"),
        ({"items": [{"name": str(i)} for i in range(4)]}, "spec.items: Too many: 4: must have at most 3 items"),
        ({"tags": ["a", "a"]}, 'spec.tags[1]: Duplicate value: "a"'),
        ({"labels": {"a": 1}}, "spec.labels.a: Invalid value"),
        ({"items": {}}, 'spec.items in body must be of type array: "object"'),
    ],
)
def test_what_makes_a_custom_resource_invalid(spec: dict[str, Any], message: str) -> None:
    error = refused(toys(), toy(**spec))
    assert error.code == 422
    assert error.message.startswith('Toy.example.com "t" is invalid: ')
    assert message in error.message


@pytest.mark.parametrize(
    ("schema", "good", "bad", "message"),
    [
        ({"type": "integer", "multipleOf": 3}, 6, 7, "spec in body should be a multiple of 3"),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "not": {"required": ["a"]}},
            {},
            {"a": 1},
            "spec in body must not validate the schema (not)",
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            {"a": 1},
            {"a": 1, "b": 2},
            "(oneOf). Found 2 valid alternatives",
        ),
        (
            {"type": "string", "anyOf": [{"pattern": "^a"}, {"maxLength": 1}]},
            "b",
            "bb",
            "must validate at least one schema (anyOf)",
        ),
        ({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "z$"}]}, "az", "a", "should match 'z$'"),
        ({"type": "object", "maxProperties": 1, "additionalProperties": True}, {"a": 1}, {"a": 1, "b": 2}, "Too many"),
    ],
)
def test_rules_that_join_schemas(schema: Any, good: Any, bad: Any, message: str) -> None:
    assert CRD is not None
    resource = Registry.builtin().add_definition(prepare_create(CRD, with_spec(schema)).object)[0]
    item = {"metadata": {"name": "t", "namespace": "d"}}
    prepare_create(resource, {**item, "spec": good})
    assert message in refused(resource, {**item, "spec": bad}).message


def test_a_version_that_was_stored_stays() -> None:
    assert CRD is not None
    old = prepare_create(CRD, DEFINITION).object | {"status": {"storedVersions": ["v1alpha1"]}}
    new = copy.deepcopy(old)
    new["spec"]["versions"].pop()
    with pytest.raises(Refused, match="v1alpha1 was previously a storage version"):
        prepare_update(CRD, new, old)


def test_versions_have_the_order_of_kubernetes() -> None:
    names = ["v10", "v2", "v1", "v11beta2", "v10beta3", "v3beta1", "v12alpha1", "v11alpha2", "foo1", "foo10"]
    assert sorted(reversed(names), key=version_rank) == names


def test_what_a_custom_resource_may_be() -> None:
    for spec in ({"port": 1}, {"port": "http"}, {"note": None}, {"size": 9}, {"when": "2026-01-02T03:04:05.5+02:00"}):
        prepare_create(toys(), toy(**spec))
    assert (
        "spec.size: Required value"
        in refused(toys(), {"metadata": {"name": "t", "namespace": "d"}, "spec": {}}).message
    )
    odd = {**toy(), "metadata": {"name": "t", "namespace": "d", "labels": {"a": 1}}}
    assert refused(toys(), odd).code == 400
    unnamed = {**toy(), "metadata": {"name": None, "namespace": "d", "creationTimestamp": None}}
    assert "metadata.name: Required value" in refused(toys(), unnamed).message


def test_generations_and_the_status_of_custom_resources() -> None:
    old = prepare_create(toys(), {**toy(), "status": {"phase": "Done"}}).object
    assert "status" not in old
    assert "status" not in prepare_update(toys(), {**old, "status": {"phase": "Done"}}, old).object
    made = prepare_update(toys(), {**old, "status": {"phase": "Done"}}, old, subresource="status").object
    assert made["status"] == {"phase": "Done"} and made["metadata"]["generation"] == 1
    new = copy.deepcopy(made)
    new["spec"]["size"] = 4
    new["status"] = {}
    with pytest.raises(Refused, match='^Toy.example.com "t" is invalid: spec.size: Invalid value: "string"'):
        prepare_update(toys(), {**made, "spec": {"size": "big"}}, made)
    newer = prepare_update(toys(), new, made).object
    assert newer["metadata"]["generation"] == 2 and newer["status"] == {"phase": "Done"}
    labelled = copy.deepcopy(newer)
    labelled["metadata"]["labels"] = {"a": "b"}
    assert prepare_update(toys(), labelled, newer).object["metadata"]["generation"] == 2


def test_a_rule_for_the_whole_object_is_not_judged_by_what_changes() -> None:
    assert CRD is not None
    strange = definition()
    strange["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["anyOf"] = [{"required": ["spec"]}]
    registry = Registry.builtin()
    resource = registry.add_definition(prepare_create(CRD, strange).object)[0]
    old = prepare_create(resource, toy()).object
    labelled = {**old, "metadata": {**old["metadata"], "labels": {"a": "b"}}}
    assert prepare_update(resource, labelled, old).object["metadata"]["labels"] == {"a": "b"}
    assert "(anyOf)" in refused(resource, {"metadata": {"name": "t", "namespace": "d"}}).message


def test_a_deprecated_version_warns() -> None:
    assert CRD is not None
    registry = Registry.builtin()
    registry.add_definition(prepare_create(CRD, DEFINITION).object)
    old = registry.find("example.com", "v1alpha1", "toys")
    assert old is not None
    ready = prepare_create(old, {**toy(), "apiVersion": "example.com/v1alpha1", "kind": "Toy"})
    assert ready.warnings == ["example.com/v1alpha1 Toy is deprecated"]
    assert converted(ready.object, toys())["apiVersion"] == "example.com/v1"


@pytest.mark.parametrize(
    "part",
    [{"required": 3}, {"enum": 3}, {"minimum": "x"}, {"maxLength": "3"}, {"pattern": 3}, {"anyOf": [3]}, {"not": 4}],
)
@pytest.mark.parametrize("place", ["items", "additionalProperties"])
def test_a_schema_is_checked_all_the_way_down(place: str, part: dict[str, Any]) -> None:
    """Otherwise every object of the kind is an internal error."""
    assert CRD is not None
    kind_of = {"items": "array", "additionalProperties": "object"}[place]
    error = refused(CRD, with_spec({"type": kind_of, place: {"type": "string", **part}}))
    assert error.code == 400 and f"properties.spec.{place}.{next(iter(part))}" in error.message
    typo = with_spec({"type": kind_of, place: {"type": "object", "propertis": {}}})
    strict = refused(CRD, typo, field_validation="Strict")
    assert (
        f'unknown field "spec.versions[0].schema.openAPIV3Schema.properties.spec.{place}.propertis"' in strict.message
    )
    prepare_create(CRD, with_spec({"type": "object", "additionalProperties": True}), field_validation="Strict")
    fills = {"type": "object", "required": ["a"], "default": {}, "properties": {"a": {"type": "integer", "default": 1}}}
    prepare_create(CRD, with_spec(fills), field_validation="Strict")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": {"name": "x.example.com"}}, "must be spec.names.plural"),
        ({"spec": {**DEFINITION["spec"], "scope": "Galaxy"}}, "spec.scope: Unsupported value"),
        ({"spec": {**DEFINITION["spec"], "versions": []}}, "spec.versions: Required value"),
        (with_spec({"type": "integer", "default": "x"}), 'properties[spec].default: Invalid value: "string"'),
        (
            with_spec(
                {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer", "default": ""}}}}
            ),
            'properties[spec].items.properties[a].default: Invalid value: "string"',
        ),
        (with_spec({"type": "object", "additionalProperties": "x"}), "must be a schema, true or false"),
        (
            {"spec": {**DEFINITION["spec"], "versions": [{**DEFINITION["spec"]["versions"][0], "storage": False}]}},
            "must have exactly one version marked as storage version",
        ),
        (
            {
                "spec": {
                    **DEFINITION["spec"],
                    "versions": [
                        {
                            "name": "v1",
                            "served": True,
                            "storage": True,
                            "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": {}}}},
                            "additionalPrinterColumns": [{"name": "A", "type": "string", "jsonPath": ".a["}],
                        }
                    ],
                }
            },
            "properties[spec].type: Required value: must not be empty for specified object fields",
        ),
    ],
)
def test_what_makes_a_definition_invalid(change: dict[str, Any], message: str) -> None:
    assert CRD is not None
    error = refused(CRD, {**DEFINITION, **change})
    assert error.code == 422 and message in error.message
