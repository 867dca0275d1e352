from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.kube_http import JSON_PATCH, STRATEGIC_PATCH, Client, Object

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def definition(group: str) -> Object:
    size = {"type": "integer", "minimum": 1, "maximum": 9, "description": "How big it is."}
    schema = {
        "type": "object",
        "required": ["spec"],
        "properties": {
            "spec": {
                "type": "object",
                "required": ["size"],
                "properties": {
                    "size": size,
                    "color": {"type": "string", "enum": ["red", "blue"], "default": "red"},
                    "open": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                },
            },
            "status": {"type": "object", "properties": {"phase": {"type": "string"}}},
        },
    }
    columns = [
        {"name": "Size", "type": "integer", "jsonPath": ".spec.size"},
        {"name": "Color", "type": "string", "jsonPath": ".spec.color", "priority": 1},
    ]
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
        "additionalPrinterColumns": columns,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"widgets.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": "Widget", "plural": "widgets", "singular": "widget", "shortNames": ["wdg"]},
            "versions": [version],
        },
    }


@dataclass(frozen=True)
class Widgets:
    group: str
    path: str


@pytest.fixture
def widgets(client: Client, namespace: str) -> Iterator[Widgets]:
    group = f"g{secrets.token_hex(4)}.example.com"
    client.post(DEFINITIONS, definition(group)).expect(201)
    with client.watch(DEFINITIONS, fieldSelector=f"metadata.name=widgets.{group}") as events:
        for event in events:
            conditions = (event["object"].get("status") or {}).get("conditions") or ()
            if any(item["type"] == "Established" and item["status"] == "True" for item in conditions):
                break
    yield Widgets(group, f"/apis/{group}/v1/namespaces/{namespace}/widgets")
    client.delete(f"{DEFINITIONS}/widgets.{group}")
    client.until_gone(f"{DEFINITIONS}/widgets.{group}")


def widget(group: str, name: str = "w", **spec: object) -> Object:
    return {"apiVersion": f"{group}/v1", "kind": "Widget", "metadata": {"name": name}, "spec": {"size": 3, **spec}}


def test_a_defined_kind_is_served_at_once(client: Client, widgets: Widgets) -> None:
    found = client.get(f"{DEFINITIONS}/widgets.{widgets.group}").expect(200)
    conditions = {item["type"]: item["status"] for item in found["status"]["conditions"]}
    assert conditions["NamesAccepted"] == "True" and conditions["Established"] == "True"
    assert found["status"]["acceptedNames"]["kind"] == "Widget"
    assert found["status"]["storedVersions"] == ["v1"]
    made = client.post(widgets.path, widget(widgets.group)).expect(201)
    assert made["spec"] == {"size": 3, "color": "red"}
    listed = client.get(widgets.path).expect(200)
    assert (listed["kind"], len(listed["items"])) == ("WidgetList", 1)


def test_discovery_knows_it(client: Client, widgets: Widgets) -> None:
    found = client.until(f"/apis/{widgets.group}/v1", lambda answer: answer.code == 200)
    resources = found.expect(200)["resources"]
    assert {item["name"] for item in resources} == {"widgets", "widgets/status"}
    assert resources[0]["shortNames"] == ["wdg"]


@pytest.mark.since(24)
def test_openapi_v3_knows_it(client: Client, widgets: Widgets) -> None:
    document = client.get(f"/openapi/v3/apis/{widgets.group}/v1").expect(200)
    schemas = [schema for name, schema in document["components"]["schemas"].items() if name.endswith(".Widget")]
    assert schemas[0]["properties"]["spec"]["properties"]["size"]["description"] == "How big it is."


def test_objects_are_held_against_the_schema(client: Client, widgets: Widgets) -> None:
    for spec, field in (
        ({"size": 10}, "spec.size"),
        ({"size": "3"}, "spec.size"),
        ({"color": "green"}, "spec.color"),
        ({"size": None}, "spec.size"),
    ):
        status = client.post(widgets.path, widget(widgets.group, **spec)).expect(422, "Invalid")
        assert field in [cause["field"] for cause in status["details"]["causes"]], status
    client.post(widgets.path, {**widget(widgets.group), "spec": None}).expect(422, "Invalid")


@pytest.mark.since(25)
def test_unknown_fields_are_refused_reported_or_dropped(client: Client, widgets: Widgets) -> None:
    item = widget(widgets.group, colour="red", open={"anything": {"goes": True}})
    status = client.post(widgets.path, item, fieldValidation="Strict").expect(400, "BadRequest")
    assert 'unknown field "spec.colour"' in status["message"]
    warned = client.post(widgets.path, item, fieldValidation="Warn", dryRun="All")
    assert 'unknown field \\"spec.colour\\"' in warned.headers["warning"]
    made = client.post(widgets.path, item, fieldValidation="Ignore").expect(201)
    assert "colour" not in made["spec"]
    assert made["spec"]["open"] == {"anything": {"goes": True}}


def test_null_in_a_field_that_cannot_be_null_is_no_value(client: Client, widgets: Widgets) -> None:
    made = client.post(widgets.path, widget(widgets.group, color=None, open=None)).expect(201)
    assert made["spec"] == {"size": 3, "color": "red"}


def test_generation_counts_changes_of_the_spec_only(client: Client, widgets: Widgets) -> None:
    made = client.post(widgets.path, widget(widgets.group)).expect(201)
    assert made["metadata"]["generation"] == 1
    path = f"{widgets.path}/w"
    assert client.patch(path, {"metadata": {"labels": {"a": "b"}}}).expect(200)["metadata"]["generation"] == 1
    assert client.patch(path, {"spec": {"size": 4}}).expect(200)["metadata"]["generation"] == 2
    assert client.patch(f"{path}/status", {"status": {"phase": "Up"}}).expect(200)["metadata"]["generation"] == 2


def test_generation_counts_the_deletion_too(client: Client, widgets: Widgets) -> None:
    held = widget(widgets.group)
    held["metadata"]["finalizers"] = ["example.com/hold"]
    client.post(widgets.path, held).expect(201)
    for _ in range(2):
        assert client.delete(f"{widgets.path}/w").expect(200)["metadata"]["generation"] == 2
    client.patch(f"{widgets.path}/w", {"metadata": {"finalizers": None}}).expect(200)


def test_spec_and_status_have_their_own_paths(client: Client, widgets: Widgets) -> None:
    made = client.post(widgets.path, {**widget(widgets.group), "status": {"phase": "Early"}}).expect(201)
    assert "status" not in made
    path = f"{widgets.path}/w"
    assert "status" not in client.patch(path, {"status": {"phase": "Wrong"}}).expect(200)
    written = client.patch(f"{path}/status", {"status": {"phase": "Right"}, "spec": {"size": 9}}).expect(200)
    assert (written["status"]["phase"], written["spec"]["size"]) == ("Right", 3)


def test_an_update_must_name_its_version(client: Client, widgets: Widgets) -> None:
    client.post(widgets.path, widget(widgets.group)).expect(201)
    status = client.put(f"{widgets.path}/w", widget(widgets.group)).expect(422, "Invalid")
    assert status["details"]["causes"][0]["field"] == "metadata.resourceVersion"


def test_patches_of_custom_objects(client: Client, widgets: Widgets) -> None:
    client.post(widgets.path, widget(widgets.group)).expect(201)
    path = f"{widgets.path}/w"
    client.patch(path, {"spec": {"size": 5}}, STRATEGIC_PATCH).expect(415, "UnsupportedMediaType")
    operation = {"op": "replace", "path": "/spec/size", "value": 6}
    assert client.patch(path, [operation], JSON_PATCH).expect(200)["spec"]["size"] == 6
    client.patch(path, {"spec": {"size": 60}}).expect(422, "Invalid")


def test_tables_have_the_printer_columns(client: Client, widgets: Widgets) -> None:
    client.post(widgets.path, widget(widgets.group)).expect(201)
    headers = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    table = client.request("GET", widgets.path, headers=headers).expect(200)
    assert [(column["name"], column["priority"]) for column in table["columnDefinitions"]] == [
        ("Name", 0),
        ("Size", 0),
        ("Color", 1),
    ]
    assert table["rows"][0]["cells"] == ["w", 3, "red"]


def test_a_definition_takes_its_objects_along(client: Client, namespace: str) -> None:
    group = f"g{secrets.token_hex(4)}.example.com"
    path = f"/apis/{group}/v1/namespaces/{namespace}/widgets"
    client.post(DEFINITIONS, definition(group)).expect(201)
    for _ in range(200):
        if client.post(path, widget(group)).code == 201:
            break
    client.patch(f"{path}/w", {"metadata": {"finalizers": ["example.com/hold"]}}).expect(200)
    client.delete(f"{DEFINITIONS}/widgets.{group}").expect(200)
    assert client.post(path, widget(group, "late")).code in (403, 405)
    client.patch(f"{path}/w", {"metadata": {"finalizers": None}}).expect(200)
    client.until_gone(f"{DEFINITIONS}/widgets.{group}")
    assert client.get(path).code == 404
    client.until("/apis", lambda answer: group not in [item["name"] for item in answer.expect(200)["groups"]])


def test_a_bad_definition_is_refused(client: Client) -> None:
    wrong = definition("bad.example.com")
    wrong["metadata"]["name"] = "gadgets.bad.example.com"
    client.post(DEFINITIONS, wrong).expect(422, "Invalid")
    none = definition("bad.example.com")
    none["spec"]["versions"] = []
    client.post(DEFINITIONS, none).expect(422, "Invalid")
    untyped = definition("bad.example.com")
    untyped["spec"]["versions"][0]["schema"]["openAPIV3Schema"] = {"properties": {"spec": {"type": "nonsense"}}}
    client.post(DEFINITIONS, untyped).expect(422, "Invalid")
