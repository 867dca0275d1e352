"""Which taints a node has for its faults. Pure.

The taint says who set it, by its key, and why, by its value. So whoever looks at the node next can lift it when the
fault is over, and nobody's other taint is touched. Pods that are there stay (NoSchedule): what becomes of them is
decided job by job.
"""

from __future__ import annotations

from evertrain.clusterd.resched.views import NodeView
from evertrain.kube.port import Object

KEY = "evertrain.dev/fault"
NODE_UNHEALTHY, ISOLATED, PRE_SEPARATE = "NodeUnhealthy", "Isolated", "PreSeparate"
CARD_UNHEALTHY, SUB_HEALTHY = "CardUnhealthy", "SubHealthy"
NO_SCHEDULE, PREFER_NOT = "NoSchedule", "PreferNoSchedule"


def fault(node: NodeView, *, chips: bool) -> tuple[str, str] | None:
    """The value and effect of the taint. `chips`: the scheduler itself keeps pods off chips with faults; where it does
    not, one such chip closes the node."""
    health = node.health
    if health.lost:
        return NODE_UNHEALTHY, NO_SCHEDULE
    if node.isolated:
        return ISOLATED, NO_SCHEDULE
    if health.leaving:
        return PRE_SEPARATE, NO_SCHEDULE
    if not chips and (health.unhealthy or health.closed):
        return CARD_UNHEALTHY, NO_SCHEDULE
    if not chips and health.is_sub_healthy:
        return SUB_HEALTHY, PREFER_NOT
    return None


def wanted(node: Object, fault: tuple[str, str] | None) -> list[Object] | None:
    """All taints that the node should have, or None if it has them."""
    have = list((node.get("spec") or {}).get("taints") or ())
    ours = [taint for taint in have if taint.get("key") == KEY]
    right = [{"key": KEY, "value": fault[0], "effect": fault[1]}] if fault is not None else []
    if [(taint.get("value"), taint.get("effect")) for taint in ours] == [
        (each["value"], each["effect"]) for each in right
    ]:
        return None
    return [*(taint for taint in have if taint.get("key") != KEY), *right]
