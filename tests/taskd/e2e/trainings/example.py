"""The example, behind a gate."""

import runpy
from pathlib import Path

import gate  # noqa: F401

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parents[4] / "examples" / "resumable" / "train.py"), run_name="__main__")
