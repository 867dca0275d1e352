"""What is in deploy/, as kubectl makes it of the kustomize files, and as Helm would make it of the chart."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubectls import kubectls

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.parent.name for path in (DEPLOY / "overlays").glob("*/kustomization.yaml"))

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The definition of AscendJobs has thousands of lines."""

Object = dict[str, Any]
Name = tuple[str, str, str]
"""Kind, namespace and name."""


def name_of(item: Object) -> Name:
    metadata = item["metadata"]
    return item["kind"], metadata.get("namespace", ""), metadata["name"]


@functools.cache
def kustomized(folder: str, kubectl: str = "") -> dict[Name, Object]:
    """The objects of that folder of deploy/; skips the test where there is no kubectl."""
    known = kubectls()
    if not known:
        pytest.skip("there is no kubectl")
    command = [kubectl or list(known.values())[-1], "kustomize", str(DEPLOY / folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    items = [item for item in yaml.load_all(done.stdout, LOADER) if item]
    found = {name_of(item): item for item in items}
    assert len(found) == len(items), "two objects of the same name"
    return found


@functools.cache
def pods(folder: str) -> dict[str, Object]:
    """The pods' spec of each workload, by its name."""
    workloads = [item for name, item in kustomized(folder).items() if name[0] in ("Deployment", "DaemonSet", "Job")]
    return {item["metadata"]["name"]: item["spec"]["template"]["spec"] for item in workloads}


# Helm is a program that can't be had everywhere. The chart's templates know few things, and so does this:
#   {{ .Values.a.b }}
#   {{- if has .Values.a (list "x" "y") }} … {{- end }}, {{- if .Values.a }} … and {{- if not .Values.a }} …, not nested


def charted(values: Mapping[str, Any]) -> dict[Name, Object]:
    """The objects of the chart with these values over its own."""
    merged = _merged(yaml.safe_load((DEPLOY / "chart/values.yaml").read_text()), values)
    files = [*(DEPLOY / "chart/templates").glob("*.yaml"), *(DEPLOY / "chart/crds").glob("*.yaml")]
    contents = [(path.parent.name, path.read_text()) for path in files]
    texts = [text if folder == "crds" else _template(text, merged) for folder, text in contents]
    items = [item for text in texts for item in yaml.load_all(text, LOADER) if item]
    found = {name_of(item): item for item in items}
    assert len(found) == len(items), "two objects of the same name"
    return found


def _template(text: str, values: Mapping[str, Any]) -> str:
    def choose(match: re.Match[str]) -> str:
        verb, path, words, content = match.groups()
        value = _value(path, values)
        met = value in re.findall(r'"([^"]*)"', words) if words else bool(value) != (verb == "not ")
        return str(content) if met else ""

    def fill(match: re.Match[str]) -> str:
        value = _value(match[1], values)
        return str(value).lower() if isinstance(value, bool) else str(value)

    condition = r"\s*{{- if (has |not |)([\w.]+)(?: \(list ([^)]*)\))? }}(.*?)\s*{{- end }}"
    text = re.sub(condition, choose, text, flags=re.DOTALL)
    text = re.sub(r"{{ ([\w.]+) }}", fill, text)
    assert "{{" not in text, text[text.index("{{") :][:100]
    return text


def _value(path: str, values: Mapping[str, Any]) -> Any:
    assert path.startswith(".Values."), path
    found: Any = values
    for name in path.removeprefix(".Values.").split("."):
        found = found[name]
    return found


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for name, value in over.items():
        found[name] = _merged(found[name], value) if isinstance(value, Mapping) else value
    return found
