"""The Dockerfiles, as far as they can be checked where no images can be built."""

from __future__ import annotations

import fnmatch
import re

import pytest

from evertrain import __version__
from evertrain.cli.main import COMMANDS
from tests.deploy.deployed import DEPLOY, ROOT
from tests.taskd.documents import DOCKERFILE_PYTORCH
from tools.wheels import NAMES

IMAGES = DEPLOY / "images"
MADE = [f"dist/{name}-{__version__}-py3-none-any.whl" for name in ("evertrain", *NAMES)]
"""By `make wheels`."""


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", (IMAGES / name).read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("name", [path.name for path in IMAGES.iterdir()])
def test_what_is_copied_is_there_after_make_wheels_and_not_ignored(name: str) -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for word, rest in instructions(name):
        if word == "COPY":
            for source in rest.split()[:-1]:
                found = [path for path in MADE if fnmatch.fnmatch(path, source)] or [source]
                assert len(found) == 1 and (found[0] in MADE or (ROOT / found[0]).exists()), source
                assert any(fnmatch.fnmatch(found[0], pattern) for pattern in kept), source


def test_the_training_image_is_made_by_the_lines_of_the_documents() -> None:
    """tests/taskd/integration/test_wheels.py runs them."""
    lines = [line.strip() for line in DOCKERFILE_PYTORCH.splitlines() if line.strip()]
    run = [rest for word, rest in instructions("training.Dockerfile") if word == "RUN"]
    assert len(lines) == 3
    start = run.index(lines[0])
    assert run[start : start + 3] == lines


def test_the_control_plane_is_one_program_that_needs_no_root() -> None:
    found = dict(instructions("control-plane.Dockerfile"))
    assert found["ENTRYPOINT"] == '["evertrain"]'
    assert found["USER"] == "9000:9000"
    assert {"operator", "clusterd", "noded", "credentials"} <= COMMANDS.keys()
    assert f"evertrain-control-plane:{__version__}" in (IMAGES / "control-plane.Dockerfile").read_text()
