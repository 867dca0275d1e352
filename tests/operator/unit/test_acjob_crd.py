"""The definition that is shipped: current, structural, small enough, and it knows every field of real jobs."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from evertrain.acjob.crd import definition
from evertrain.acjob.job import Job
from evertrain.acjob.validation import validate
from evertrain.kube.port import Object
from evertrain.operator.manifests import as_yaml

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ROOT / "deploy" / "crds" / "ascendjobs.yaml"
SAMPLES = Path(os.environ.get("EVERTRAIN_SAMPLES") or ROOT.parent / "shared" / "reference" / "samples")
FILES = sorted(SAMPLES.rglob("*.yaml")) if SAMPLES.is_dir() else []


def without_pods(crd: Object) -> Object:
    version = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    replica = version["properties"]["spec"]["properties"]["replicaSpecs"]["additionalProperties"]
    del replica["properties"]["template"]["properties"]["spec"]
    return crd


def test_the_shipped_file_is_current() -> None:
    shipped = SHIPPED.read_text()
    if f"lightkube-models {importlib.metadata.version('lightkube-models')}." in shipped.splitlines()[0]:
        assert shipped == as_yaml(), "run: python -m evertrain.operator.manifests > deploy/crds/ascendjobs.yaml"
    else:  # other models of pods are installed here
        assert without_pods(yaml.safe_load(shipped)) == without_pods(definition())


def test_what_kubectl_shows() -> None:
    spec = definition()["spec"]
    assert spec["names"] == {
        "kind": "AscendJob",
        "listKind": "AscendJobList",
        "plural": "ascendjobs",
        "singular": "ascendjob",
        "shortNames": ["acjob"],
    }
    assert [(column["name"], column["jsonPath"]) for column in spec["versions"][0]["additionalPrinterColumns"]] == [
        ("State", ".status.conditions[-1:].type"),
        ("Age", ".metadata.creationTimestamp"),
    ]


def test_small_enough_for_kubectl_apply() -> None:
    assert len(json.dumps(definition())) < 200 * 1024


def schemas(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    yield path, schema
    for name, each in schema.get("properties", {}).items():
        yield from schemas(each, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from schemas(schema[key], f"{path}.{key}")


def test_the_schema_is_structural() -> None:
    """What Kubernetes demands of every level."""
    root = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path, schema in schemas(root):
        flexible = schema.get("x-kubernetes-int-or-string")
        assert flexible or "type" in schema, path
        assert "$ref" not in schema, path
        assert not ("properties" in schema and "additionalProperties" in schema), path
        assert set(schema.get("required", [])) <= set(schema.get("properties", {})), path


def unknown(value: Any, schema: Object, path: str) -> Iterator[str]:
    """Fields that the schema doesn't have, and values of another type."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str):
            yield f"{path}: {value!r}"
        return
    types: dict[str, type | tuple[type, ...]] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "boolean": bool,
        "number": (int, float),
    }
    if not isinstance(value, types[schema["type"]]):
        yield f"{path}: {value!r} is no {schema['type']}"
    elif isinstance(value, dict):
        for key, each in value.items():
            inner = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
            if inner is None:
                yield f"{path}.{key}"
            else:
                yield from unknown(each, inner, f"{path}.{key}")
        yield from (f"{path}.{key} is missing" for key in schema.get("required", []) if key not in value)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from unknown(each, schema["items"], f"{path}[{index}]")


def jobs_in(file: Path) -> list[Object]:
    documents = yaml.safe_load_all(file.read_text())
    return [document for document in documents if document and document.get("kind") == "AscendJob"]


REJECTED = {"job_llama-2x8.yaml": "InvalidReplicaSpec: Master replicaSpec is not valid, the replicas must be only 1"}


@pytest.mark.parametrize("file", FILES, ids=[f"{file.parent.name}/{file.name}" for file in FILES])
def test_samples_of_the_original(file: Path) -> None:
    """Accepted or rejected as the original does. Without the samples there is nothing to try."""
    schema = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    jobs = jobs_in(file)
    assert jobs
    for job in jobs:
        assert list(unknown(job["spec"], schema, "spec")) == []
        job["metadata"]["name"] = job["metadata"].get("name") or "placeholder"
        refusal = validate(job)
        assert str(refusal) == REJECTED.get(file.name, "None")
        if refusal is None:
            assert Job(job).total >= 1
