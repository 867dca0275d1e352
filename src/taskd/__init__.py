"""The names under which MindCluster's scripts and frameworks import TaskD. Everything is in `evertrain.taskd`."""

from taskd.version import __version__ as __version__
