"""The log of TaskD. Importing it opens `taskd.log`."""

from evertrain.taskd.log import run_log, start

__all__ = ["run_log"]

start()
