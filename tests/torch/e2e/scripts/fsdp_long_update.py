"""Runs train_fsdp.py, in which the first update of both holders of shard 1 goes on for two seconds after they were told
to stop. The others have completed the step by then, and rank 0 is to be killed in the next one.
"""

import os
import runpy
import sys
import threading
import time

from evertrain.torch import fsdp, interrupt

told = threading.Event()
request, finish = interrupt.Interrupter.request, fsdp.FullySharded.finish


def request_and_tell(self: interrupt.Interrupter) -> None:
    told.set()
    request(self)


def finish_late(self: fsdp.FullySharded) -> None:
    if not told.is_set() and int(os.environ["RANK"]) in (1, 3):
        told.wait()
        time.sleep(2)
    finish(self)


interrupt.Interrupter.request, fsdp.FullySharded.finish = request_and_tell, finish_late
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
