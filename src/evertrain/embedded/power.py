"""The words with which a virtual node is switched off and on."""

ORDER = "evertrain.dev/power"
"""Annotation on a node: what is wanted, OFF or ON. Without it a node is on."""
STATE = "evertrain.dev/power-state"
"""Annotation on a node: what is."""
ON, OFF = "on", "off"
