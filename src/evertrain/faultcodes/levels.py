"""How bad a fault is: the levels of chips, switches and nodes, which is worse, and what each means for health. Pure."""

from __future__ import annotations

from collections.abc import Iterable

HEALTHY, SUB_HEALTHY, UNHEALTHY, PRE_SEPARATE = "Healthy", "SubHealthy", "UnHealthy", "PreSeparate"

# Chips. NormalNPU and NormalNetwork say that there is none.
NORMAL, NORMAL_NETWORK = "NormalNPU", "NormalNetwork"
NOT_HANDLE = "NotHandleFault"
SUB_HEALTH = "SubHealthFault"
RESTART_REQUEST = "RestartRequest"
RESTART_BUSINESS = "RestartBusiness"
FREE_RESTART = "FreeRestartNPU"
RESTART = "RestartNPU"
PRE_SEPARATE_CHIP = "PreSeparateNPU"
SEPARATE_CHIP = "SeparateNPU"
MANUAL = "ManuallySeparateNPU"

CHIP_LEVELS = (
    NORMAL, NOT_HANDLE, SUB_HEALTH, RESTART_REQUEST, RESTART_BUSINESS, FREE_RESTART, RESTART, PRE_SEPARATE_CHIP,
    SEPARATE_CHIP, MANUAL,
)  # fmt: skip
"""From the lightest to the worst."""

HARMLESS = frozenset({NOT_HANDLE, SUB_HEALTH, NORMAL, NORMAL_NETWORK})
"""A chip with none but such faults stays available."""

# Nodes. NotHandleFault is shared with chips.
PRE_SEPARATE_NODE, SEPARATE_NODE = "PreSeparateFault", "SeparateFault"
NODE_LEVELS = (NOT_HANDLE, PRE_SEPARATE_NODE, SEPARATE_NODE)
NODE_STATUS = {NOT_HANDLE: HEALTHY, PRE_SEPARATE_NODE: PRE_SEPARATE, SEPARATE_NODE: UNHEALTHY}

# Switches say some of the same in other words.
SWITCH_NOT_HANDLE, SWITCH_PRE_SEPARATE, SWITCH_SEPARATE, SWITCH_RESET = "NotHandle", "PreSeparate", "Separate", "Reset"
SWITCH_LEVELS = (SWITCH_NOT_HANDLE, SUB_HEALTH, RESTART_REQUEST, SWITCH_PRE_SEPARATE, SWITCH_SEPARATE)
SWITCH_STATUS = {
    "": HEALTHY,
    SWITCH_NOT_HANDLE: HEALTHY,
    SUB_HEALTH: SUB_HEALTHY,
    RESTART_REQUEST: UNHEALTHY,
    SWITCH_PRE_SEPARATE: PRE_SEPARATE,
    SWITCH_SEPARATE: UNHEALTHY,
}
_SWITCH_SPELLINGS = {
    NOT_HANDLE: SWITCH_NOT_HANDLE,
    "RestartRequestFault": RESTART_REQUEST,
    PRE_SEPARATE_NODE: SWITCH_PRE_SEPARATE,
    SEPARATE_NODE: SWITCH_SEPARATE,
    "ResetFault": SWITCH_SEPARATE,
    SWITCH_RESET: SWITCH_SEPARATE,
}
"""A switch that needs a reset counts as one to keep away from."""

_HEALTH = {
    NORMAL: HEALTHY,
    NORMAL_NETWORK: HEALTHY,
    NOT_HANDLE: HEALTHY,
    SWITCH_NOT_HANDLE: HEALTHY,
    SUB_HEALTH: SUB_HEALTHY,
    "SubHealth": SUB_HEALTHY,
    PRE_SEPARATE_CHIP: SUB_HEALTHY,
    PRE_SEPARATE_NODE: SUB_HEALTHY,
    SWITCH_PRE_SEPARATE: SUB_HEALTHY,
}
_RANKS = {level: rank for rank, level in enumerate(CHIP_LEVELS)} | {NORMAL_NETWORK: 0}
_HEALTHS = (HEALTHY, SUB_HEALTHY, UNHEALTHY)


def severity(level: str) -> int:
    """The higher the worse. A level that nobody knows counts as one that asks for the chip to be kept away."""
    return _RANKS.get(level, _RANKS[SEPARATE_CHIP])


def worst(levels: Iterable[str]) -> str:
    """The worst of the levels of a chip; NormalNPU if there are none."""
    return max(levels, key=severity, default=NORMAL)


def worst_node(levels: Iterable[str]) -> str:
    known = [level for level in levels if level in NODE_LEVELS]
    return max(known, key=NODE_LEVELS.index, default=NOT_HANDLE)


def switch_level(level: str) -> str:
    """A switch's level in the words of SwitchInfoCfg, from those or from the words of configuration files."""
    return _SWITCH_SPELLINGS.get(level, level)


def worst_switch(levels: Iterable[str]) -> str:
    """Empty if there are none."""
    known = [level for level in map(switch_level, levels) if level in SWITCH_LEVELS]
    return max(known, key=SWITCH_LEVELS.index, default="")


def health(level: str) -> str:
    """Healthy, SubHealthy or UnHealthy, for a level of a chip, a switch or a node. Unknown ones are UnHealthy."""
    return _HEALTH.get(level, UNHEALTHY)


def worst_health(healths: Iterable[str]) -> str:
    return max(healths, key=lambda each: _HEALTHS.index(each) if each in _HEALTHS else len(_HEALTHS), default=HEALTHY)
