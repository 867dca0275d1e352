"""Whether the pods of a cluster get a network of their own. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from evertrain.embedded.network import plan

ALLOW = "run the cluster as root, or allow user namespaces (docs/virtual-nodes.md)"


@dataclass(frozen=True)
class Shared:
    """Pods are in the network of this machine although nobody asked for that: why, and how to get them out of it."""

    reason: str
    remedy: str

    def text(self) -> str:
        """What that costs, too."""
        return (
            f"Pods share the network of this machine ({self.reason}), so jobs that listen on the same port run one "
            f"after the other; for networks of their own {self.remedy}."
        )


def not_allowed(reason: str) -> Shared:
    return Shared(reason, ALLOW)


def unfit(wanted: bool | None, *, nodes: int, clusterd: bool) -> Shared | None:
    """Why such a cluster is not for a network of its own, whatever the kernel allows. `wanted`: None if nobody said;
    `clusterd`: it has one, which is reached from inside."""
    if nodes > plan.MOST_NODES:
        return Shared(f"{nodes} nodes don't fit into one of their own", f"start at most {plan.MOST_NODES} nodes")
    if not clusterd and wanted is None:
        return Shared("a ClusterD beside the cluster could not be reached from any other", "add --own-network")
    return None
