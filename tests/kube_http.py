"""A Kubernetes API client of a few lines, so that the contract tests see the wire and not somebody's library."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

Object = dict[str, Any]
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


@dataclass(frozen=True)
class Answer:
    code: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def expect(self, code: int, reason: str = "") -> Any:
        assert self.code == code, f"{self.code} instead of {code}: {self.body[:2000]!r}"
        content = self.json
        if reason:
            assert content["kind"] == "Status" and content["status"] == "Failure" and content["code"] == code
            assert content["reason"] == reason, content
        return content


class Client:
    def __init__(self, url: str, token: str, authority: str | None) -> None:
        parts = urlsplit(url)
        self._host = parts.netloc
        self._token = token
        self._tls = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context(cafile=authority)
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, timeout=timeout)
        return http.client.HTTPSConnection(self._host, timeout=timeout, context=self._tls)

    def _headers(self, headers: dict[str, str] | None, content_type: str) -> dict[str, str]:
        made = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        if content_type:
            made["Content-Type"] = content_type
        return {key: value for key, value in {**made, **(headers or {})}.items() if value}

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        headers: dict[str, str] | None = None,
        **query: str,
    ) -> Answer:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        target = quote(path) + ("?" + urlencode(query) if query else "")
        sent = self._headers(headers, content_type if data is not None else "")
        for attempt in (1, 2):
            if self._connection is None:
                self._connection = self._connect(30)
            try:
                self._connection.request(method, target, body=data, headers=sent)
                response = self._connection.getresponse()
                content = response.read()
            except (ConnectionError, http.client.HTTPException, OSError):
                self.close()
                if attempt == 2:
                    raise
                continue
            found = {key.lower(): value for key, value in response.getheaders()}
            if response.will_close:
                self.close()
            return Answer(response.status, found, content)
        raise AssertionError("not reached")

    def get(self, path: str, **query: str) -> Answer:
        return self.request("GET", path, **query)

    def post(self, path: str, body: Any, **query: str) -> Answer:
        return self.request("POST", path, body, **query)

    def put(self, path: str, body: Any, **query: str) -> Answer:
        return self.request("PUT", path, body, **query)

    def patch(self, path: str, body: Any, content_type: str = MERGE_PATCH, **query: str) -> Answer:
        return self.request("PATCH", path, body, content_type=content_type, **query)

    def delete(self, path: str, body: Any = None, **query: str) -> Answer:
        return self.request("DELETE", path, body, **query)

    @contextmanager
    def watch(
        self, path: str, *, timeout: float = 60.0, headers: dict[str, str] | None = None, **query: str
    ) -> Iterator[Iterator[Object]]:
        """Events one by one; a wait of more than `timeout` seconds fails."""
        connection = self._connect(timeout)
        try:
            target = quote(path) + "?" + urlencode({"watch": "true", **query})
            connection.request("GET", target, headers=self._headers(headers, ""))
            response = connection.getresponse()
            assert response.status == 200, response.read()
            yield (json.loads(line) for line in iter(response.readline, b""))
        finally:
            connection.close()

    def until(self, path: str, condition: Callable[[Answer], bool], seconds: float = 60.0) -> Answer:
        """For what a real server does in the background."""
        end = time.monotonic() + seconds
        while not condition(answer := self.get(path)):
            assert time.monotonic() < end, f"{path} stays as it is: {answer.body[:1000]!r}"
            time.sleep(0.02)
        return answer

    def until_gone(self, path: str, seconds: float = 60.0) -> None:
        """Waits for controllers to finish a deletion."""
        end = time.monotonic() + seconds
        while self.get(path).code != 404:
            assert time.monotonic() < end, f"{path} is still there: {self.get(path).body[:1000]!r}"
            time.sleep(0.02)


def ended(events: Iterator[Object], number: int) -> list[Object]:
    """The next so many events that are no bookmarks."""
    found: list[Object] = []
    for event in events:
        if event["type"] != "BOOKMARK":
            found.append(event)
        if len(found) == number:
            break
    return found
