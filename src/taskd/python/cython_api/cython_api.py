"""`lib`: a ctypes handle of libs/libtaskd.so; None if it isn't there or not to be trusted."""

from evertrain.taskd.native.library import load
from taskd.python.utils.log import run_log as run_log  # which opens the log

lib = load()
