"""The wheel of evertrain under the names that MindCluster's Dockerfiles install: taskd and mindio_ttp.

    python -m tools.wheels dist

`pip3 install $TASKD_WHL` is given one file, and perhaps no index that has evertrain. So both contain all of it.
Installed one after the other, in any order, they write the same files.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

NAMES = ("taskd", "mindio_ttp")


def renamed(wheel: Path, name: str) -> Path:
    """Write the same wheel, beside it, as the distribution `name`."""
    distribution, version, *tags = wheel.stem.split("-")
    old, new = f"{distribution}-{version}.dist-info/", f"{name}-{version}.dist-info/"
    target = wheel.with_name("-".join((name, version, *tags)) + ".whl")
    record = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as written:
        for entry in source.infolist():
            if entry.filename == f"{old}RECORD":
                continue
            content = source.read(entry)
            if entry.filename == f"{old}METADATA":
                content = content.replace(f"\nName: {distribution}\n".encode(), f"\nName: {name}\n".encode(), 1)
            entry.filename = entry.filename.replace(old, new)
            written.writestr(entry, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{entry.filename},sha256={digest},{len(content)}\n")
        written.writestr(f"{new}RECORD", "".join(record) + f"{new}RECORD,,\n")
    return target


def main(folder: Path) -> None:
    (wheel,) = folder.glob("evertrain-*.whl")
    for name in NAMES:
        renamed(wheel, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
