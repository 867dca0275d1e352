"""Plugins of users: files in `plugin_dir` that see what the manager sees and may decide otherwise.

A plugin is a Python file with a class derived from `Plugin`:

    from evertrain.taskd.manager.plugins import Plugin

    class Tell(Plugin):
        def signal(self, signal):
            print("ClusterD says", signal.type)
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import stat
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evertrain.taskd.frames import Body
from evertrain.taskd.manager.orders import Order, Signal
from evertrain.taskd.manager.reports import Report
from evertrain.taskd.net.routing import Position

log = logging.getLogger(__name__)


class Plugin:
    """Every method returns None, and then the manager does what it always does, or the orders to carry out instead."""

    def signal(self, signal: Signal) -> Sequence[Order] | None:
        """ClusterD, or the manager's own judgement, wants something."""

    def report(self, report: Report) -> Sequence[Order] | None:
        """The MindIO controller reports; with orders in return nobody else hears of it."""

    def message(self, who: Position, body: Body) -> Sequence[Order] | None:
        """An agent or a worker says something."""


class Plugins:
    def __init__(self, plugins: Sequence[Plugin] = ()) -> None:
        self._plugins = list(plugins)

    def ask(self, method: str, *args: Any) -> list[Order] | None:
        """The first answer. A plugin that fails is as good as none."""
        for plugin in self._plugins:
            try:
                orders = getattr(plugin, method)(*args)
                if orders is None:
                    continue
                orders = list(orders)
                if wrong := [order for order in orders if not isinstance(order, Order)]:
                    raise TypeError(f"{wrong[0]!r} is no order")
            except Exception:
                log.error(
                    "plugin %s: %s failed, it is ignored: %s", type(plugin).__name__, method, traceback.format_exc()
                )
                continue
            log.info("plugin %s decides about %s: %s", type(plugin).__name__, method, orders)
            return orders
        return None


def load(folder: str) -> Plugins:
    """All plugins of a folder, by the names of their files.

    What can't be used is logged as an error and left out. The job trains without its plugins, as it does with the
    original, which reads none; without a manager it would end. Code that others may write is never run.
    """
    if not folder:
        return Plugins()
    try:
        files = _files(Path(folder))
    except (OSError, ValueError) as error:
        log.error("no plugins: plugin_dir %s: %s", folder, error.strerror if isinstance(error, OSError) else error)
        return Plugins()
    found: list[Plugin] = []
    for file in files:
        try:
            found += _plugins_of(file)
        except ValueError as error:
            log.error("plugin %s is left out: %s", file, str(error))
    log.info("plugins of %s: %s", folder, ", ".join(type(each).__name__ for each in found) or "none")
    return Plugins(found)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError("no such folder")
    _check_owner(folder.stat())
    return [file for file in sorted(folder.glob("*.py")) if not file.name.startswith("_")]


def _plugins_of(file: Path) -> list[Plugin]:
    module = types.ModuleType(f"taskd_plugin_{file.stem}")
    module.__file__ = str(file)
    source = _source(file)
    sys.modules[module.__name__] = module  # as an import does, for what asks a class for its module
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
        classes = [
            each
            for _, each in inspect.getmembers(module, inspect.isclass)
            if issubclass(each, Plugin) and each is not Plugin and each.__module__ == module.__name__
        ]
        if not classes:
            raise LookupError("there is no class derived from Plugin in it")
        return [each() for each in classes]
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _source(file: Path) -> bytes:
    """What was checked is what is run: neither the name nor a compiled copy is trusted."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "not a regular file" if error.errno == errno.ELOOP else error.strerror
        raise ValueError(why) from None
    with os.fdopen(descriptor, "rb") as opened:
        facts = os.fstat(opened.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("not a regular file")
        _check_owner(facts)
        return opened.read()


def _check_owner(facts: os.stat_result) -> None:
    if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        raise ValueError("it must belong to root or to us, and nobody else may write to it")
