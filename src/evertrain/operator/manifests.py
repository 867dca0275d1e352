"""What has to be installed in a cluster before the operator runs, as text: `python -m evertrain.operator.manifests`."""

from __future__ import annotations

import importlib.metadata

import yaml

from evertrain.acjob.crd import definition


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def as_yaml() -> str:
    """The text of deploy/crds/ascendjobs.yaml."""
    models = importlib.metadata.version("lightkube-models")
    note = f"# Made by `python -m evertrain.operator.manifests` from lightkube-models {models}.\n"
    return note + str(yaml.dump(definition(), Dumper=_Plain, sort_keys=False, width=120))


if __name__ == "__main__":
    print(as_yaml(), end="")
