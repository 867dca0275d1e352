"""What users write must not hurt more than their own job."""

from __future__ import annotations

import pytest

from evertrain.acjob import ranktable
from evertrain.acjob.job import Job
from evertrain.acjob.pods import token_secret
from evertrain.clusterd import reset, traces
from evertrain.clusterd.jobs import table
from evertrain.clusterd.recover.events import WriteReset
from evertrain.clusterd.resched import launchers, views

DEEP = "[" * 100_000
"""JSON that no parser can follow to its end."""


def test_json_that_is_too_deep_is_no_json():
    annotations = {"ascend.kubectl.kubernetes.io/ascend-910-configuration": DEEP}
    pod = {"metadata": {"name": "a", "uid": "u", "annotations": annotations}}
    assert traces.read({"data": {"profilingSwitch": DEEP}}) is None
    assert table.read_pod(pod).devices == ()
    assert views.read_pod(pod).chips == frozenset()
    assert ranktable.invalidated(DEEP) is None and ranktable.next_version(DEEP, "1", 1.0) == "0"
    assert launchers.leaving({"data": {"reset.json": DEEP}}, True, 1) is None
    with pytest.raises(reset.Refused):
        reset.renewed({"reset.json": DEEP}, WriteReset("clear"), 1)


def test_a_job_has_not_the_token_of_an_earlier_one_of_its_name():
    one, other = (Job({"metadata": {"name": "train", "namespace": "default", "uid": uid}}) for uid in ("1", "2"))
    assert token_secret(one, "x")["metadata"]["name"] != token_secret(other, "y")["metadata"]["name"]
