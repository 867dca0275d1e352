"""The original's sample jobs on the embedded API server: each is taken whole, and judged as the original judges it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from evertrain import aio
from evertrain.kube.port import ASCEND_JOB, NAMESPACE, POD_GROUP, ApiError, Object
from evertrain.operator.shell import Operator
from tests.operator.cluster import background, cluster, until

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = Path(os.environ.get("EVERTRAIN_SAMPLES") or ROOT.parent / "shared" / "reference" / "samples")
FILES = sorted(SAMPLES.rglob("*.yaml")) if SAMPLES.is_dir() else []
REFUSED = {"job_llama-2x8.yaml": "InvalidReplicaSpec: Master replicaSpec is not valid, the replicas must be only 1"}


@pytest.mark.parametrize("files", [FILES] if FILES else [], ids=["all"] if FILES else [])
def test_samples(files: list[Path], tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as running:
            wanted: dict[str, str] = {}
            for number, file in enumerate(files):
                space = f"sample-{number}"
                await running.kube.create(NAMESPACE, {"metadata": {"name": space}})
                documents = [each for each in yaml.safe_load_all(file.read_text()) if each]
                [job] = [each for each in documents if each["kind"] == "AscendJob"]
                job["metadata"]["namespace"] = space
                if not job["metadata"].get("name"):
                    with pytest.raises(ApiError, match="name or generateName is required"):
                        await running.kube.create(ASCEND_JOB, job)
                    job["metadata"]["name"] = "placeholder"
                made = await running.kube.create(ASCEND_JOB, job)
                assert made["spec"] == job["spec"], file
                wanted[space] = REFUSED.get(file.name, "")

            accepted = {space for space, refusal in wanted.items() if not refusal}

            async def grouped() -> set[str]:
                return {group["metadata"]["namespace"] for group in (await running.kube.list(POD_GROUP)).items}

            async def judged() -> bool:
                jobs = (await running.kube.list(ASCEND_JOB)).items
                return all((job.get("status") or {}).get("conditions") for job in jobs) and await grouped() >= accepted

            operator = Operator(running.kube, rank_tables=tmp_path / "ranktables")
            async with background(operator.run):
                await until(judged)
            assert await grouped() == accepted
            for item in (await running.kube.list(ASCEND_JOB)).items:
                last: Object = item["status"]["conditions"][-1]
                refusal = wanted[item["metadata"]["namespace"]]
                if refusal:
                    assert (last["type"], last["reason"], last["message"]) == ("Failed", "JobValidFailed", refusal)
                else:
                    assert last["type"] == "Created"
            assert len(wanted) >= 16

    aio.run(test())
