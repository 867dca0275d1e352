"""What is there before anybody has asked for anything."""

from __future__ import annotations

from evertrain.embedded.api.core import Api
from evertrain.embedded.schema import Refused

NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease", "mindx-dl", "volcano-system")


def bootstrap(api: Api) -> None:
    """Makes the namespaces that clients take for granted; those that are there stay as they are."""
    resource = api.registry.find("", "v1", "namespaces")
    assert resource is not None
    for name in NAMESPACES:
        try:
            api.create(resource, "", {"metadata": {"name": name}})
        except Refused as refused:
            if refused.reason != "AlreadyExists":
                raise
