"""Run a program that dies with the launcher: `python orphan.py LAUNCHER_PID PROGRAM ARG...`.

Ranks that are Python scripts arrange this themselves. For `--no-python` this file asks the kernel for it and then
turns into the program; the request survives the exec. It imports nothing of ours, so that it can run without a path.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, program, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        sys.exit("evertrain: the launcher that started this process is gone")
    try:
        os.execvp(program, [program, *arguments])
    except OSError as error:
        sys.exit(f"evertrain: {program}: {error.strerror}")


if __name__ == "__main__":
    main()
