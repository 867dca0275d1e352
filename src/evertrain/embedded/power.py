"""The words on a virtual node: that it is one, and those with which it is switched off and on."""

ORDER = "evertrain.dev/power"
"""Annotation on a node: what is wanted, OFF or ON. Without it a node is on."""
STATE = "evertrain.dev/power-state"
"""Annotation on a node: what is."""
ON, OFF = "on", "off"
VIRTUAL = "evertrain.dev/virtual"
"""Label of a node that is ours."""
