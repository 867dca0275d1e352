"""A process ends only when gloo's workers have let go of the last tensors: they need the interpreter for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
{front_door}
import ctypes, hashlib, os, threading, torch

begun = threading.Event()

def worker():
    # As a worker that is late with its last operation: it computes without the interpreter, and needs it afterwards.
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)
    begun.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000)
    os.write(1, b"let go")

threading.Thread(target=worker, daemon=True).start()
begun.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names that others see on Linux only")
@pytest.mark.parametrize("front_door", ["from evertrain.torch import groups", "import mindio_ttp.framework_ttp"])
def test_a_late_worker_is_waited_for(front_door: str) -> None:
    script = SCRIPT.format(front_door=front_door)
    end = subprocess.run([sys.executable, "-c", script], check=True, timeout=120, stdout=subprocess.PIPE)
    assert end.stdout == b"let go"
