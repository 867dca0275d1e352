"""Which level each code has on this cluster: what is shipped, our own codes, and what the administrator says. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from evertrain.faultcodes import overrides
from evertrain.faultcodes.table import Codes, shipped
from evertrain.noded import codes as own

_CHIP_FILES = (overrides.CHIP_FILE, overrides.SWITCH_FILE, overrides.RULES_FILE)


def tables(
    chip_config: Mapping[str, str] | None, node_config: Mapping[str, str] | None, local: str = ""
) -> tuple[Codes, list[str]]:
    """From the data of the two ConfigMaps and, without one for nodes, the text of a local NodeDConfiguration.json; and
    what is wrong with them. A file that can't be used changes nothing."""
    texts = tuple((chip_config or {}).get(file) or "" for file in _CHIP_FILES)
    found, wrong = _tables(texts, (node_config or {}).get(overrides.NODE_FILE) or local)
    return found, list(wrong)


@functools.lru_cache(maxsize=16)
def _tables(chip_texts: tuple[str, ...], node_text: str) -> tuple[Codes, tuple[str, ...]]:
    found, wrong = overrides.with_config(shipped(), dict(zip(_CHIP_FILES, chip_texts, strict=True)))
    if node_text:
        found, more = overrides.nodes(found, node_text)
        wrong = wrong + more
    # A file made for the original doesn't know our codes; that must not switch our detectors off.
    return replace(found, node=own.LEVELS | dict(found.node)), tuple(wrong)
