"""The documentation names what there is: every option, fault kind and phase, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from evertrain.cli.demo.features import FEATURES, Feature
from evertrain.cli.demo.recorded import PHASES
from evertrain.launch.options import OPTIONS
from evertrain.mindio import faultspec
from tests.features.e2e.test_demo import TIMED

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("README.md")]


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


@pytest.mark.parametrize("feature", FEATURES.values(), ids=lambda feature: feature.name)
def test_every_feature_has_an_example_and_a_page_that_teach_it(feature: Feature) -> None:
    example = (ROOT / "examples" / "resumable" / feature.example).with_name("README.md")
    page = example.parent / re.findall(r"\[More about it\]\(([^)]+)\)", example.read_text())[-1]
    assert page.parent.resolve() == ROOT / "docs"
    assert {"when-to-use-it", "limits", "try-it"} <= headings(page)
    tried = page.read_text().split("## Try it")[1]
    assert "What is seen" in " ".join(tried.split())
    for text in (example.read_text(), tried):
        assert re.search(rf"make demo\sFEATURE={feature.name}(?![\w-])", text)
    assert f"(../examples/resumable/{example.parent.name}/README.md)" in tried


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize(
    "page", sorted((ROOT / "examples/resumable").rglob("README.md")), ids=lambda page: str(page.parent.name)
)
def test_an_example_finds_nothing_of_the_last_one_and_leaves_nothing_to_the_next(page: Path) -> None:
    first, *others, last = commands(page)
    assert first.startswith("rm -rf /tmp/evertrain; mkdir -p /tmp/evertrain/output && "), first
    assert last == "evertrain down"
    ups = [each for each in others if each.startswith("evertrain up ")]
    assert len(ups) == 1 and "--detach" in ups[0], ups
    began = [number for number, each in enumerate(others) if "kubectl apply -f " in each]
    ended = [number for number, each in enumerate(others) if each.startswith("kubectl delete acjob ")]
    assert len(began) == len(ended) and all(start < end for start, end in zip(began, ended, strict=True))
    assert all(end < start for start, end in zip(began[1:], ended, strict=False)), "one job at a time"
    for start, end in zip(began, ended, strict=True):
        faulty = any(each.startswith("evertrain inject ") for each in others[start:end])
        assert faulty == others[end].endswith("; evertrain inject clear"), others[end]
    for start, end in zip(began[1:], ended, strict=False):
        assert "rm -rf /tmp/evertrain/output; mkdir /tmp/evertrain/output" in others[end:start]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_phases_are_shown_in_the_words_that_a_demo_has_for_them(page: Path) -> None:
    for name, words in re.findall(r"^ *([a-z][a-z ]*?) +\d+ ms   (.*)$", page.read_text(), re.MULTILINE):
        assert name == "total" or words == PHASES[name]


DEMOS = [
    (page, block)
    for page in PAGES
    for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL)
    if re.search(r"^ *yes  ", block, re.MULTILINE)
]


def test_every_page_of_a_feature_shows_its_demo() -> None:
    """But that of link failover, which has no fault in it."""
    shown = {page.stem for page, _ in DEMOS}
    assert len(shown) == 9 and "README" in shown, shown


@pytest.mark.parametrize("block", [block for _, block in DEMOS], ids=[page.stem for page, _ in DEMOS])
def test_a_demo_is_shown_up_to_its_end(block: str) -> None:
    assert re.search(rf"\n *yes  {TIMED}\n *yes  (identical|the same) .*\nIt took \d+ s in all\.\n$", block), block


def test_every_own_option_is_described_and_no_other() -> None:
    described = set(re.findall(r"^\| `(--ft-[a-z-]+)", (ROOT / "docs/launch.md").read_text(), re.MULTILINE))
    assert described == {flag for option in OPTIONS for flag in option.spellings() if flag.startswith("--ft-")}


def test_every_fault_kind_and_phase_is_described() -> None:
    text = (ROOT / "docs/faults-and-recovery.md").read_text()
    for word in (*faultspec.KINDS, *faultspec.PHASES):
        assert f"`{word}`" in text, word


@pytest.mark.parametrize("file", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda file: str(file.parent.name))
def test_a_job_of_the_examples_that_has_failed_keeps_no_chips(file: Path) -> None:
    (job,) = [each for each in yaml.safe_load_all(file.read_text()) if each["kind"] == "AscendJob"]
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"


@pytest.mark.parametrize("file", ["docs/mindio.md", "examples/resumable/train.py"])
@pytest.mark.parametrize(("code", "told"), [(0, 0), (2, 1), (137, 1)])
def test_processes_that_are_started_in_a_loop_fail_if_one_does(tmp_path: Path, file: str, code: int, told: int) -> None:
    (loop,) = re.findall(r"\(for rank in .*?; exit \$code\)", (ROOT / file).read_text(), re.DOTALL)
    (tmp_path / "python").write_text(f'#!/bin/sh\n[ "$RANK" != 1 ] || exit {code}\n')
    (tmp_path / "python").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(["bash", "-c", loop], env=environment, cwd=tmp_path).returncode == told
