"""How the commands of the cluster run: one asyncio loop, one place where errors become messages and exit codes."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from evertrain import aio

PACKAGES = ("lightkube", "starlette", "uvicorn", "cryptography")

FAILED, USAGE, INTERRUPTED = 1, 2, 130


class UsageError(Exception):
    """What the user asked for can't be done as it was asked. The text says why."""


class CommandError(Exception):
    """The command failed. The text says why."""


def run(command: str, main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    if missing := missing_packages():
        return complain(command, missing, USAGE)
    from evertrain.kube.port import ApiError

    try:
        code = aio.run(main())
    except UsageError as error:
        return complain(command, str(error), USAGE)
    except CommandError as error:
        return complain(command, str(error), FAILED)
    except ApiError as error:
        return complain(command, f"the server refused ({error.reason or error.code}): {error.message}", FAILED)
    except BrokenPipeError:
        return _nobody_reads(0)
    except (ConnectionError, TimeoutError) as error:
        return complain(command, f"the cluster can't be reached: {error}", FAILED)
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return complain(command, text, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _nobody_reads(code)
    return code


def _nobody_reads(code: int) -> int:
    """The reader, `head` for example, has seen enough. Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def on_signals(action: Callable[[], object], *numbers: signal.Signals) -> None:
    """Instead of what the signals do by themselves; one that was ignored at the start (`nohup`) stays so."""
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, action)


def seconds(text: str) -> float:
    """For argparse: a time that something may take."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return found


def missing_packages() -> str:
    """What to tell a user who has installed Evertrain without the packages of the cluster; empty if all are there."""
    names = ", ".join(name for name in PACKAGES if importlib.util.find_spec(name) is None)
    return f"needs packages that are not installed ({names}): pip install 'evertrain[cluster]'" if names else ""


def complain(command: str, text: str, code: int) -> int:
    print(f"evertrain {command}: {text}", file=sys.stderr)
    return code
