from __future__ import annotations

import pytest

from tests.kube_http import Client


@pytest.fixture
def five(client: Client, maps: str) -> str:
    for number in range(5):
        labels = {"number": str(number), "parity": "odd" if number % 2 else "even"}
        if number == 4:
            labels["last"] = ""
        client.post(maps, {"metadata": {"name": f"m{number}", "labels": labels}}).expect(201)
    return maps


def names(client: Client, path: str, **query: str) -> list[str]:
    return [item["metadata"]["name"] for item in client.get(path, **query).expect(200)["items"]]


def test_a_list_has_its_kind_and_version(client: Client, five: str) -> None:
    found = client.get(five).expect(200)
    assert (found["kind"], found["apiVersion"]) == ("ConfigMapList", "v1")
    newest = max(int(item["metadata"]["resourceVersion"]) for item in found["items"])
    assert int(found["metadata"]["resourceVersion"]) >= newest
    assert len(found["items"]) >= 5


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("parity=odd", "13"),
        ("parity==odd,number!=3", "1"),
        ("number in (0, 2,4)", "024"),
        ("number notin (0,1),parity", "234"),
        ("last", "4"),
        ("!last,parity=even", "02"),
        ("last=", "4"),
        ("number>2", "34"),
        ("number<1", "0"),
    ],
)
def test_label_selectors_choose(client: Client, five: str, selector: str, expected: str) -> None:
    assert names(client, five, labelSelector=selector) == [f"m{letter}" for letter in expected]


@pytest.mark.parametrize("selector", ["a in b", "a in (b", "=b", "a=b=c", "a,,b", "!", "a!b", "-a=b", "a=-b-"])
def test_bad_label_selectors_are_bad_requests(client: Client, maps: str, selector: str) -> None:
    client.get(maps, labelSelector=selector).expect(400, "BadRequest")


def test_field_selectors_choose(client: Client, five: str, namespace: str) -> None:
    assert names(client, five, fieldSelector="metadata.name=m3") == ["m3"]
    assert names(client, "/api/v1/configmaps", fieldSelector=f"metadata.namespace={namespace},metadata.name=m1") == [
        "m1"
    ]
    assert "m0" not in names(client, five, fieldSelector="metadata.name!=m0")


def test_pods_can_be_chosen_by_node_and_phase(client: Client, pods: str) -> None:
    for name in ("p", "q"):
        spec = {"containers": [{"name": "c", "image": "i"}], "schedulerName": "nobody"}
        client.post(pods, {"metadata": {"name": name}, "spec": spec}).expect(201)
    client.post(f"{pods}/p/binding", {"metadata": {"name": "p"}, "target": {"name": "n1"}}).expect(201)
    assert names(client, pods, fieldSelector="spec.nodeName=n1") == ["p"]
    assert names(client, pods, fieldSelector="spec.nodeName=") == ["q"]
    assert names(client, pods, fieldSelector="status.phase=Pending,spec.nodeName!=n1") == ["q"]
    client.delete(f"{pods}/p", gracePeriodSeconds="0").expect(200)


def test_fields_that_can_not_be_selected_are_named(client: Client, maps: str, pods: str) -> None:
    status = client.get(maps, fieldSelector="data.a=1").expect(400, "BadRequest")
    assert '"data.a" is not a known field selector: only "metadata.name", "metadata.namespace"' in status["message"]
    status = client.get(pods, fieldSelector="spec.a=1").expect(400, "BadRequest")
    assert "field label not supported: spec.a" in status["message"]


def test_pages_show_one_moment(client: Client, five: str) -> None:
    first = client.get(five, limit="2", labelSelector="parity").expect(200)
    assert [item["metadata"]["name"] for item in first["items"]] == ["m0", "m1"]
    # What happens meanwhile is not in the later pages.
    client.delete(f"{five}/m3").expect(200)
    client.post(five, {"metadata": {"name": "m2a", "labels": {"parity": "new"}}}).expect(201)
    seen = ["m0", "m1"]
    token = first["metadata"]["continue"]
    while token:
        page = client.get(five, limit="2", labelSelector="parity", **{"continue": token}).expect(200)
        assert page["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
        seen += [item["metadata"]["name"] for item in page["items"]]
        token = page["metadata"].get("continue")
    assert seen == ["m0", "m1", "m2", "m3", "m4"]


def test_a_page_says_how_many_are_left(client: Client, five: str) -> None:
    total = len(names(client, five))
    page = client.get(five, limit="2").expect(200)
    assert page["metadata"]["remainingItemCount"] == total - 2


def test_a_broken_continue_token_is_a_bad_request(client: Client, maps: str) -> None:
    client.get(maps, limit="2", **{"continue": "bm90aGluZw"}).expect(400, "BadRequest")


def test_a_list_can_be_of_an_earlier_version(client: Client, five: str) -> None:
    version = client.get(five).expect(200)["metadata"]["resourceVersion"]
    client.delete(f"{five}/m0").expect(200)
    client.patch(f"{five}/m1", {"data": {"a": "1"}}).expect(200)
    exact = client.get(five, resourceVersion=version, resourceVersionMatch="Exact").expect(200)
    assert exact["metadata"]["resourceVersion"] == version
    items = {item["metadata"]["name"]: item for item in exact["items"]}
    assert "m0" in items and "data" not in items["m1"]
    newer = client.get(five, resourceVersion=version, resourceVersionMatch="NotOlderThan").expect(200)
    assert "m0" not in [item["metadata"]["name"] for item in newer["items"]]


def test_a_version_that_is_long_gone_is_gone(client: Client, maps: str) -> None:
    client.get(maps, resourceVersion="1", resourceVersionMatch="Exact").expect(410, "Expired")


def test_a_version_of_the_future_is_a_timeout(client: Client, maps: str) -> None:
    status = client.get(maps, resourceVersion="999999999999").expect(504, "Timeout")
    assert status["details"]["causes"][0]["reason"] == "ResourceVersionTooLarge"


@pytest.mark.stricter
def test_a_version_must_be_a_number(client: Client, maps: str) -> None:
    assert client.get(maps, resourceVersion="abc").code in (400, 422)


def test_a_match_needs_a_version_and_is_a_known_one(client: Client, maps: str) -> None:
    client.get(maps, resourceVersionMatch="Exact").expect(422, "Invalid")
    client.get(maps, resourceVersion="5", resourceVersionMatch="Perhaps").expect(422, "Invalid")


def test_a_table_has_columns_and_rows(client: Client, five: str) -> None:
    headers = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}
    table = client.request("GET", five, headers=headers, labelSelector="parity=odd").expect(200)
    assert (table["kind"], table["apiVersion"]) == ("Table", "meta.k8s.io/v1")
    assert [column["name"] for column in table["columnDefinitions"]] == ["Name", "Data", "Age"]
    assert [row["cells"][:2] for row in table["rows"]] == [["m1", 0], ["m3", 0]]
    assert table["rows"][0]["object"]["kind"] == "PartialObjectMetadata"
    single = client.request("GET", f"{five}/m2", headers=headers).expect(200)
    assert [row["cells"][0] for row in single["rows"]] == ["m2"]


def test_metadata_can_be_had_alone(client: Client, five: str) -> None:
    headers = {"Accept": "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"}
    found = client.request("GET", five, headers=headers).expect(200)
    assert found["kind"] == "PartialObjectMetadataList"
    assert set(found["items"][0]) <= {"kind", "apiVersion", "metadata"}


def test_an_answer_in_a_form_that_nobody_knows_is_not_acceptable(client: Client, maps: str) -> None:
    client.request("GET", maps, headers={"Accept": "image/png"}).expect(406, "NotAcceptable")
