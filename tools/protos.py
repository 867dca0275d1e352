"""Write src/evertrain/wire/*_pb2.py from proto/*.proto, or check that they are what protoc would write.

    python -m tools.protos [--check]

The messages have no package, as the wire demands, and names as common as `Message`. So that they never meet those of
other software in the same process, they live in a pool of descriptors of their own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "proto"
TARGET = ROOT / "src" / "evertrain" / "wire"

_SHARED_POOL = "_descriptor_pool.Default()"
_OWN_POOL = "_pool"


def generate() -> dict[str, str]:
    """By file name: what it should contain."""
    names = sorted(path.name for path in PROTOS.glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        command = ["protoc", f"-I{PROTOS}", f"--python_out={folder}", f"--pyi_out={folder}", *names]
        if protoc.main(command) != 0:
            raise SystemExit("protoc failed, see above")
        return {path.name: _ours(path.read_text()) for path in sorted(Path(folder).iterdir())}


def _ours(text: str) -> str:
    if _SHARED_POOL not in text:
        return text
    text = text.replace(_SHARED_POOL, _OWN_POOL)
    marker = "# @@protoc_insertion_point(imports)\n"
    return text.replace(marker, f"from evertrain.wire.pool import pool as {_OWN_POOL}\n{marker}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not current")
    check = parser.parse_args().check
    wanted = generate()
    present = {path.name: path.read_text() for path in TARGET.glob("*_pb2.py*")}
    if wanted == present:
        return 0
    if check:
        odd = sorted(name for name in {*wanted, *present} if wanted.get(name) != present.get(name))
        print(f"not what protoc writes: {', '.join(odd)}; run: make proto", file=sys.stderr)
        return 1
    for name in present.keys() - wanted.keys():
        (TARGET / name).unlink()
    for name, text in wanted.items():
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
