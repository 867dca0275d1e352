"""Commands of Evertrain's, given as a user gives them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path


async def give(kubeconfig: Path, *arguments: str) -> tuple[int, str]:
    """The exit code, and what was said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "evertrain.cli", *arguments, "--kubeconfig", str(kubeconfig),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, said.decode(errors="replace")
