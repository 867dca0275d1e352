"""Addresses."""

from evertrain.taskd.ip import pre_handle_ip

__all__ = ["pre_handle_ip"]
