"""What msrun falls back to where TaskD's agent can't be used. It lives in `evertrain.taskd.agent.msrun_plugin`."""

from evertrain.taskd.agent.msrun_plugin import MSRunPlugin

__all__ = ["MSRunPlugin"]
