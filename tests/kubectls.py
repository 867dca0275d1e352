"""The kubectl binaries of this machine: the one on the PATH, and other versions that lie beside it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest


def kubectls() -> dict[str, str]:
    """Path by version (`1.27`), oldest first; empty if there is none."""
    found = shutil.which("kubectl")
    if found is None:
        return {}
    beside = Path(os.path.realpath(found)).parent
    versions = {
        match[1]: str(path)
        for path in beside.glob("kubectl.1.*")
        if (match := re.fullmatch(r"kubectl\.(1\.\d+)", path.name)) and os.access(path, os.X_OK)
    }
    wanted = {version: path for version, path in versions.items() if 27 <= int(version[2:]) <= 33}
    ordered = dict(sorted(wanted.items(), key=lambda item: int(item[0][2:])))
    return ordered or {"default": found}


def marks(versions: dict[str, str]) -> dict[str, tuple[pytest.MarkDecorator, ...]]:
    """When tests of each version run: the newest always, the oldest with the matrix, those between when all is run.
    Each call of kubectl costs a tenth of a second of a core."""
    oldest, newest = next(iter(versions), ""), next(reversed(versions), "")
    found: dict[str, tuple[pytest.MarkDecorator, ...]] = dict.fromkeys(versions, (pytest.mark.exhaustive,))
    return found | {oldest: (pytest.mark.matrix,), newest: ()}
