"""Namespaces that we need, where nobody has made them."""

from __future__ import annotations

import contextlib

from evertrain.kube.port import NAMESPACE, AlreadyExists, Kube, NotFound


async def make(kube: Kube, name: str) -> None:
    """Unless it is there. Raises ApiError, OSError or TimeoutError."""
    try:
        await kube.get(NAMESPACE, name)
    except NotFound:
        with contextlib.suppress(AlreadyExists):
            metadata = {"name": name}
            await kube.create(
                NAMESPACE, {"apiVersion": NAMESPACE.api_version, "kind": NAMESPACE.kind, "metadata": metadata}
            )
