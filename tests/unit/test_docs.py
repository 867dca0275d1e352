"""The documentation names what there is: every option, fault kind and phase, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evertrain.launch.options import OPTIONS
from evertrain.mindio import faultspec

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/README.md")]


def headings(page: Path) -> set[str]:
    """The anchors that a page offers, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in headings(file), target


def test_every_own_option_is_described_and_no_other() -> None:
    described = set(re.findall(r"^\| `(--ft-[a-z-]+)", (ROOT / "docs/launch.md").read_text(), re.MULTILINE))
    assert described == {flag for option in OPTIONS for flag in option.spellings() if flag.startswith("--ft-")}


def test_every_fault_kind_and_phase_is_described() -> None:
    text = (ROOT / "docs/faults-and-recovery.md").read_text()
    for word in (*faultspec.KINDS, *faultspec.PHASES):
        assert f"`{word}`" in text, word
