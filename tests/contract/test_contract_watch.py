from __future__ import annotations

from typing import Any

import pytest

from tests.kube_http import Client, ended


def version(client: Client, path: str) -> str:
    found: str = client.get(path).expect(200)["metadata"]["resourceVersion"]
    return found


def brief(event: dict[str, Any]) -> tuple[str, str]:
    return event["type"], event["object"]["metadata"]["name"]


def test_a_watch_tells_every_change_once_and_in_order(client: Client, maps: str) -> None:
    with client.watch(maps, resourceVersion=version(client, maps)) as events:
        client.post(maps, {"metadata": {"name": "a"}, "data": {"k": "1"}}).expect(201)
        client.patch(f"{maps}/a", {"data": {"k": "2"}}).expect(200)
        client.post(maps, {"metadata": {"name": "b"}}).expect(201)
        client.delete(f"{maps}/a").expect(200)
        found = ended(events, 4)
    assert [brief(event) for event in found] == [("ADDED", "a"), ("MODIFIED", "a"), ("ADDED", "b"), ("DELETED", "a")]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in found]
    assert versions == sorted(set(versions))
    assert found[3]["object"]["data"] == {"k": "2"}


def test_a_watch_goes_on_where_another_ended(client: Client, maps: str) -> None:
    start = version(client, maps)
    for number in range(4):
        client.post(maps, {"metadata": {"name": f"m{number}"}}).expect(201)
    with client.watch(maps, resourceVersion=start) as events:
        first = ended(events, 2)
    middle = first[-1]["object"]["metadata"]["resourceVersion"]
    with client.watch(maps, resourceVersion=middle) as events:
        rest = ended(events, 2)
    assert [brief(event)[1] for event in first + rest] == ["m0", "m1", "m2", "m3"]


def test_a_watch_without_a_version_begins_with_what_is_there(client: Client, maps: str) -> None:
    client.post(maps, {"metadata": {"name": "a", "labels": {"x": "1"}}}).expect(201)
    with client.watch(maps, labelSelector="x") as events:
        assert brief(next(events)) == ("ADDED", "a")
        client.delete(f"{maps}/a").expect(200)
        assert brief(next(events)) == ("DELETED", "a")


def test_an_object_that_enters_or_leaves_the_selection_is_added_or_deleted(client: Client, maps: str) -> None:
    client.post(maps, {"metadata": {"name": "a"}}).expect(201)
    with client.watch(maps, resourceVersion=version(client, maps), labelSelector="on=yes") as events:
        written = [
            client.patch(f"{maps}/a", {"metadata": {"labels": {"on": value}}}).expect(200)
            for value in ("yes", "no", "yes")
        ]
        written.append(client.patch(f"{maps}/a", {"data": {"k": "1"}}).expect(200))
        client.delete(f"{maps}/a").expect(200)
        found = ended(events, 5)
    assert [brief(event)[0] for event in found] == ["ADDED", "DELETED", "ADDED", "MODIFIED", "DELETED"]
    left = found[1]["object"]["metadata"]
    assert left["labels"] == {"on": "yes"}, "as it was when it still belonged to the selection"
    told = [event["object"]["metadata"]["resourceVersion"] for event in found[:4]]
    assert told == [item["metadata"]["resourceVersion"] for item in written], "a watch goes on after this change"


def test_one_object_can_be_watched_by_its_name(client: Client, maps: str) -> None:
    with client.watch(maps, resourceVersion=version(client, maps), fieldSelector="metadata.name=b") as events:
        client.post(maps, {"metadata": {"name": "a"}}).expect(201)
        client.post(maps, {"metadata": {"name": "b"}}).expect(201)
        assert brief(next(events)) == ("ADDED", "b")


def test_a_watch_of_all_namespaces_sees_all(client: Client, maps: str) -> None:
    start = version(client, "/api/v1/configmaps")
    with client.watch("/api/v1/configmaps", resourceVersion=start, labelSelector="mine=1") as events:
        client.post(maps, {"metadata": {"name": "a", "labels": {"mine": "1"}}}).expect(201)
        assert brief(next(events)) == ("ADDED", "a")


def test_a_watch_ends_when_its_time_is_over(client: Client, maps: str) -> None:
    with client.watch(maps, resourceVersion=version(client, maps), timeoutSeconds="1") as events:
        assert [event for event in events if event["type"] != "BOOKMARK"] == []


def test_a_bookmark_at_the_end_carries_the_version(client: Client, maps: str) -> None:
    start = version(client, maps)
    client.post("/api/v1/namespaces/default/configmaps", {"metadata": {"generateName": "elsewhere-"}}).expect(201)
    with client.watch(maps, resourceVersion=start, timeoutSeconds="1", allowWatchBookmarks="true") as events:
        found = list(events)
    assert [event["type"] for event in found] == ["BOOKMARK"] * len(found)
    if found:  # a server may send none in so short a time
        assert found[-1]["object"]["kind"] == "ConfigMap"
        assert int(found[-1]["object"]["metadata"]["resourceVersion"]) >= int(start)


def test_a_version_that_is_too_old_is_gone(client: Client, maps: str) -> None:
    answer = client.get(maps, watch="true", resourceVersion="1", timeoutSeconds="5")
    if answer.code == 200:  # a server may also say so in the stream
        event = answer.json
        assert event["type"] == "ERROR"
        status = event["object"]
    else:
        status = answer.expect(410, "Expired")
    assert status["code"] == 410
    assert "too old resource version" in status["message"]


def test_initial_events_end_with_a_bookmark(client: Client, maps: str) -> None:
    client.post(maps, {"metadata": {"name": "a", "labels": {"x": "1"}}}).expect(201)
    query = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan", "allowWatchBookmarks": "true"}
    answer = client.get(maps, watch="true", timeoutSeconds="1", labelSelector="x", **query)
    if answer.code == 422:
        pytest.xfail("this server does not offer it")
    lines = [line for line in answer.body.splitlines() if line]
    assert b'"ADDED"' in lines[0]
    assert b'"k8s.io/initial-events-end":"true"' in lines[1]


@pytest.mark.since(27)
def test_initial_events_need_a_version_match(client: Client, maps: str) -> None:
    client.get(maps, watch="true", sendInitialEvents="true", timeoutSeconds="1").expect(422, "Invalid")


def test_a_watch_can_be_had_as_a_table(client: Client, maps: str) -> None:
    headers = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}
    with client.watch(maps, headers=headers, resourceVersion=version(client, maps)) as events:
        client.post(maps, {"metadata": {"name": "a"}}).expect(201)
        event = next(events)
    assert event["object"]["kind"] == "Table"
    assert event["object"]["rows"][0]["cells"][0] == "a"
    assert [column["name"] for column in event["object"]["columnDefinitions"]][0] == "Name"


def test_many_watchers_see_the_same(client: Client, maps: str) -> None:
    start = version(client, maps)
    for number in range(20):
        client.post(maps, {"metadata": {"name": f"m{number:02}"}}).expect(201)
    seen = []
    for _ in range(3):
        with client.watch(maps, resourceVersion=start) as events:
            seen.append([brief(event) for event in ended(events, 20)])
    assert seen[0] == seen[1] == seen[2] == [("ADDED", f"m{number:02}") for number in range(20)]
