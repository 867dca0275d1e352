"""Write the Helm chart deploy/chart from the kustomize files beside it, or check that it is what they make.

    python -m tools.chart [--check]

There is one source, deploy/base and deploy/components. The chart has every object that `kubectl kustomize` (which this
needs) makes of them, with values in the few places that people change. The components about credentials exclude each
other, and monitoring is there or not: an object that is not the same with all of them is there once for each, under a
condition.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from evertrain import __version__

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
TARGET = DEPLOY / "chart"

SELF_MADE, CERT_MANAGER, INSECURE = "self-made", "cert-manager", "insecure"
COMPONENTS = {SELF_MADE: [], CERT_MANAGER: ["cert-manager"], INSECURE: ["insecure"]}
"""By the value of `credentials`: what to add to the base."""
MONITORING = {False: [], True: ["monitoring"]}
"""By the value of `monitoring`: the same."""
NAMES = {"ascend-operator": "operator", "clusterd": "clusterd", "noded": "noded", "credentials": "credentials"}
"""By label: how values and templates call a part."""
KINDS = {"Namespace": "namespaces", "NetworkPolicy": "network", "PodMonitor": "monitoring"}
"""The same for what belongs to no part."""
NOTE = "# Made by `python -m tools.chart` from deploy/base and deploy/components.\n"
GANG = "--enableGangScheduling="

Object = dict[str, Any]
Way = tuple[str, bool]
"""The values of `credentials` and `monitoring`."""


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def rendered(way: Way) -> list[Object]:
    credentials, monitoring = way
    with tempfile.TemporaryDirectory() as folder:
        here = os.path.relpath(DEPLOY, os.path.realpath(folder))
        components = [f"{here}/components/{name}" for name in COMPONENTS[credentials] + MONITORING[monitoring]]
        content = {"resources": [f"{here}/base"], "components": components}
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(content))
        return kustomized(folder)


def kustomized(folder: str) -> list[Object]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise SystemExit("tools.chart needs kubectl, for `kubectl kustomize`")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"kubectl kustomize {folder}: {done.stderr}")
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def part_of(item: Object) -> str:
    label = (item["metadata"].get("labels") or {}).get("app.kubernetes.io/name", "")
    return NAMES.get(label) or KINDS[item["kind"]]


def pod_spec(item: Object) -> Object | None:
    found: Object | None = (item.get("spec") or {}).get("template", {}).get("spec")
    return found


def defaults(items: list[Object]) -> Object:
    """What the source says where the chart has values."""
    found: Object = {"credentials": SELF_MADE, "gangScheduling": True, "monitoring": False}
    for item in items:
        spec = pod_spec(item)
        if spec is None:
            continue
        (container,) = spec["containers"]
        repository, _, tag = container["image"].rpartition(":")
        image = {"repository": repository, "tag": tag, "pullPolicy": container["imagePullPolicy"]}
        if found.setdefault("image", image) != image:
            raise SystemExit(f"{item['metadata']['name']} has another image than the others")
        if item["kind"] == "Job":
            continue
        resources = container["resources"]
        values = {"replicas": item["spec"]["replicas"]} if "replicas" in item["spec"] else {}
        values |= {"cpu": resources["requests"]["cpu"], "memory": resources["requests"]["memory"]}
        found[part_of(item)] = values | {"memoryLimit": resources["limits"]["memory"]}
    return found


def with_values(item: Object) -> Object:
    """The object with {{ .Values… }} in it."""
    item = copy.deepcopy(item)
    spec = pod_spec(item)
    if spec is None:
        return item
    (container,) = spec["containers"]
    container["image"] = "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
    container["imagePullPolicy"] = "{{ .Values.image.pullPolicy }}"
    if item["kind"] == "Job":
        return item
    part = f".Values.{part_of(item)}"
    if "replicas" in item["spec"]:
        item["spec"]["replicas"] = f"{{{{ {part}.replicas }}}}"
    container["resources"] = {
        "requests": {"cpu": f"{{{{ {part}.cpu }}}}", "memory": f"{{{{ {part}.memory }}}}"},
        "limits": {"memory": f"{{{{ {part}.memoryLimit }}}}"},
    }
    container["args"] = [
        f"{GANG}{{{{ .Values.gangScheduling }}}}" if argument.startswith(GANG) else argument
        for argument in container["args"]
    ]
    return item


def as_template(item: Object) -> str:
    text = str(yaml.dump(item, Dumper=_Plain, sort_keys=False, width=120))
    # A number must not be quoted.
    return re.sub(r"replicas: '({{ [\w.]+ }})'", r"replicas: \1", text)


def generate() -> dict[str, str]:
    """By path in the chart: what it should contain."""
    files: dict[str, str] = {}
    versions: dict[str, dict[str, list[Way]]] = {}
    """By template: each text, and the ways with which it is wanted, in the order in which they come."""
    for way in itertools.product(COMPONENTS, MONITORING):
        for item in rendered(way):
            if item["kind"] == "CustomResourceDefinition":
                files["crds/ascendjobs.yaml"] = (DEPLOY / "crds" / "ascendjobs.yaml").read_text()
            else:
                texts = versions.setdefault(part_of(item), {})
                texts.setdefault(as_template(with_values(item)), []).append(way)
    for part, texts in versions.items():
        files[f"templates/{part}.yaml"] = NOTE + "".join(conditional(text, ways) for text, ways in texts.items())
    values = defaults(rendered((SELF_MADE, False)))
    files["values.yaml"] = NOTE + VALUES + str(yaml.dump(values, Dumper=_Plain, sort_keys=False))
    files["values.schema.json"] = json.dumps(schema(values), indent=2) + "\n"
    files["Chart.yaml"] = NOTE + CHART.format(version=__version__)
    return files


def conditional(text: str, ways: list[Way]) -> str:
    credentials, monitoring = (list(dict.fromkeys(values)) for values in zip(*ways, strict=True))
    if len(credentials) < len(COMPONENTS) and len(monitoring) < len(MONITORING):
        raise SystemExit(f"no condition was thought of for what depends on two values:\n{text}")
    if len(ways) == len(COMPONENTS) * len(MONITORING):
        return f"---\n{text}"
    named = " ".join(f'"{value}"' for value in credentials)
    condition = f"has .Values.credentials (list {named})"
    if len(monitoring) < len(MONITORING):
        condition = ".Values.monitoring" if monitoring == [True] else "not .Values.monitoring"
    return f"{{{{- if {condition} }}}}\n---\n{text}{{{{- end }}}}\n"


CHART = """\
apiVersion: v2
name: evertrain
description: AscendJob operator, ClusterD and noded, which keep distributed training running through faults
type: application
version: {version}
appVersion: {version}
kubeVersion: ">=1.20.0-0"
"""

VALUES = """\
# credentials: self-made (by a Job of ours), cert-manager (it has to be installed), or insecure (for an original TaskD)
# gangScheduling: pods of a job start together or not at all, by Volcano; false: the default scheduler
# monitoring: a PodMonitor for the Prometheus operator, which has to be installed
"""


def schema(values: Object) -> Object:
    """A value that is misspelt would leave out what it should have changed, without a word."""

    def of(value: Any) -> Object:
        if isinstance(value, dict):
            return {
                "type": "object",
                "additionalProperties": False,
                "properties": {name: of(each) for name, each in value.items()},
            }
        return {"type": {bool: "boolean", int: "integer"}.get(type(value), "string")}

    found = {"$schema": "http://json-schema.org/draft-07/schema#", **of(values)}
    found["properties"]["credentials"] = {"enum": list(COMPONENTS)}
    found["properties"]["global"] = {"type": "object"}
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="change nothing; fail if something is out of date")
    checking = arguments.parse_args().check
    wanted = generate()
    there = {str(path.relative_to(TARGET)): path for path in TARGET.rglob("*") if path.is_file()}
    stale = [name for name in wanted if name not in there or there[name].read_text() != wanted[name]]
    extra = [name for name in there if name not in wanted]
    if checking and (stale or extra):
        sys.exit(f"not what `python -m tools.chart` makes: {', '.join(sorted(stale + extra))}")
    for name in extra:
        there[name].unlink()
    for name in stale:
        path = TARGET / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[name])


if __name__ == "__main__":
    main()
