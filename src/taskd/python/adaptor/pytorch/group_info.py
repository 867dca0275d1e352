"""Writes the groups of the training for tools that look for slow nodes. It lives in `evertrain.taskd.groups`."""

from evertrain.taskd.groups import dump_group_info, get_group_info, get_save_path

__all__ = ["dump_group_info", "get_group_info", "get_save_path"]
