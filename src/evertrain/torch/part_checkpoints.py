"""Checkpoints of a state in parts: one file for each part, and a manifest that makes them one checkpoint.

    step-000000000010.parts/state.4f1c….part      written by the part's first holder, whole or not there
    step-000000000010.parts/shard-1.4f1c….part
    step-000000000010.ckpt                        the manifest: names, sizes and hashes of the files

Whoever finds after its own writing that all files are there writes the manifest; before that there is no checkpoint of
that step. The mark in the names comes from the content of the state, so that what an earlier run left behind is never
taken for a part of this one. A part that is missing, cut off or another file than the manifest means makes the
checkpoint unusable, and the next older one is taken.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evertrain.mindio.protocol import STATE
from evertrain.torch import codec
from evertrain.torch.checkpoint import CheckpointError, Checkpoints, Saving, holds_no_tensors, size_of
from evertrain.torch.codec import Packed

FOLDER = re.compile(r"step-(\d{12,18})\.parts")
Wanted = Callable[[Sequence[str], str], Sequence[str]]
"""Which of these parts, cut in this way, are to be loaded."""


class PartCheckpoints(Checkpoints):
    def save_parts(
        self, step: int, parts: Mapping[str, Packed], every: Sequence[str], cut: str, mark: str, reason: str
    ) -> Path | None:
        """Write these of a state's parts now. Returns the path if all of them are there, and so the checkpoint."""
        if tuple(every) == (STATE,):
            return self.save(step, parts[STATE], reason)
        folder = self.directory / f"step-{step:012d}.parts"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"can't create {folder}: {error.strerror}") from error
        for name, packed in parts.items():
            path = folder / _file_name(name, mark)
            if step in self.unusable or size_of(path, step) is None:
                self._put(path, step, packed, reason)
        return self._seal(step, folder, every, cut, mark, reason)

    def save_parts_async(
        self, step: int, parts: Mapping[str, Packed], every: Sequence[str], cut: str, mark: str
    ) -> Saving:
        """Copy the parts and write the copies in the background."""

        def write(copies: list[Any]) -> Path | None:
            rest = iter(copies)
            own = {name: Packed(p.skeleton, [next(rest) for _ in p.tensors]) for name, p in parts.items()}
            return self.save_parts(step, own, every, cut, mark, "periodic")

        return self._copy_and_write(step, [tensor for packed in parts.values() for tensor in packed.tensors], write)

    def load_newest_parts(self, wanted: Wanted) -> tuple[int, dict[str, Any]] | None:
        """Step and parts of the newest checkpoint of which these are whole."""
        return self.load_newest(lambda path: self._load_parts(path, wanted))

    def load_parts(self, step: int, wanted: Wanted) -> dict[str, Any]:
        try:
            found, parts = self._load_parts(self.path_of(step), wanted)
            if found != step:
                raise CheckpointError(f"{self.path_of(step)} holds step {found}: it was renamed")
        except CheckpointError:
            self.unusable.add(step)
            raise
        return parts

    def _load_parts(self, path: Path, wanted: Wanted) -> tuple[int, dict[str, Any]]:
        step, tree = self.load(path)
        if not _is_manifest(tree):
            return step, {STATE: tree}
        parts = {}
        for name in wanted(list(tree["parts"]), tree["cut"]):
            file, size, sha = tree["parts"][name]
            part = path.with_suffix(".parts") / file
            if _ending(part) != (size, sha):
                raise CheckpointError(f"{part} is missing or is not the file that was written with this checkpoint")
            found, parts[name] = self.load(part)
            if found != step:
                raise CheckpointError(f"{part} holds step {found}, not {step}")
        return step, parts

    def _seal(self, step: int, folder: Path, every: Sequence[str], cut: str, mark: str, reason: str) -> Path | None:
        files = {name: _file_name(name, mark) for name in every}
        if any(size_of(folder / file, step) is None for file in files.values()):
            return None
        parts = {name: (file, *_ending(folder / file)) for name, file in files.items()}
        return self.save(step, codec.pack({"parts": parts, "cut": cut, "manifest": 1}), reason)

    def _seems_whole(self, path: Path, step: int) -> bool:
        if not super()._seems_whole(path, step):
            return False
        try:
            if not holds_no_tensors(path):
                return True
            tree = self.load(path)[1]
        except (CheckpointError, OSError):
            return False
        folder = path.with_suffix(".parts")
        return not _is_manifest(tree) or all(
            size_of(folder / file, step) == size for file, size, _ in tree["parts"].values()
        )

    def _prune(self, written: Path) -> None:
        super()._prune(written)
        with contextlib.suppress(OSError, CheckpointError):
            kept = {step for step, _ in self._files()}
            newest = self.newest_step() or 0
            for name in os.listdir(self.directory):
                match = FOLDER.fullmatch(name)
                # One that is newer than every checkpoint is being written.
                if match and int(match[1]) not in kept and int(match[1]) < newest:
                    shutil.rmtree(self.directory / name, ignore_errors=True)


def _is_manifest(tree: Any) -> bool:
    return isinstance(tree, dict) and "manifest" in tree


def _file_name(part: str, mark: str) -> str:
    return f"{part.replace(':', '-')}.{mark}.part"


def _ending(path: Path) -> tuple[int, str]:
    """Size and checksum of a file, which its last bytes say; (-1, "") if there is none."""
    length = hashlib.sha256().digest_size
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - length))
            return size, file.read().hex()
    except OSError:
        return -1, ""
