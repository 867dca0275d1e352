"""The example, on devices of which some are broken: the stress test of each rank comes to another result."""

import os
import runpy

import example

from evertrain.taskd.worker import operations, worker


def detect(op: int) -> int:
    match os.environ["RANK"]:
        case "1":
            raise RuntimeError("the voltage does not come back")
        case "2":
            os.read(os.pipe()[0], 1)  # it never returns
        case "3":
            return 2
    return 0


worker.LIMITS[operations.AIC] = 2.0
operations.register_stress_test(detect)
runpy.run_path(example.__file__, run_name="__main__")
