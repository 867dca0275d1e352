"""Whatever the schema lets pass: the operator decides something, never fails, and settles."""

from __future__ import annotations

from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from evertrain import aio
from evertrain.kube.port import POD, Object
from tests.operator.bench import Bench

CHIPS = "ascend.kubectl.kubernetes.io/ascend-910-configuration"
texts = st.sampled_from(["", "0", "1", "-1", "3", " 2 ", "abc", "on", "off", "force", "level1=2,level2", "=,", "1e3"])
amounts = st.sampled_from([0, 1, 8, "2", "500m", "1Gi", "1e1", "0.5", "1.2.3", "1e99"])


def maybe(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Object]:
    return st.fixed_dictionaries({}, optional=fields)


resources = st.dictionaries(
    st.sampled_from(
        ["huawei.com/Ascend910", "huawei.com/npu", "huawei.com/npu-core", "cpu", "huawei.com/Ascend910-2c"]
    ),
    amounts,
    max_size=3,
)
container = maybe(
    {
        "env": st.lists(
            st.builds(
                lambda name, value: {"name": name, **value},
                st.sampled_from(["RANK", "MS_ENABLE_TFT", "HIGH_AVAILABILITY", "MINE"]),
                maybe({"value": texts}),
            ),
            max_size=3,
        ),
        "ports": st.lists(maybe({"name": st.sampled_from(["ascendjob-port", "p"]), "containerPort": st.just(7)})),
        "resources": maybe({"limits": resources, "requests": resources}),
    }
)
pod_spec = st.builds(
    lambda side, ascend, rest: {
        "containers": [*([{"name": "side", **side}] if side else []), {"name": "ascend", "image": "x", **ascend}],
        **rest,
    },
    container,
    container,
    maybe(
        {
            "volumes": st.just([{"name": "ranktable"}]),
            "schedulerName": texts,
            "nodeSelector": st.just({"accelerator-type": "module-a3-16-super-pod"}),
        }
    ),
)
replica = st.builds(
    lambda spec, metadata, rest: {"template": {"spec": spec, **metadata}, **rest},
    pod_spec,
    maybe({"metadata": maybe({"labels": st.just({"a": "b"}), "annotations": st.just({"c": "d"})})}),
    maybe({"restartPolicy": st.sampled_from(["", "Never", "Always", "OnFailure", "ExitCode"])}),
)
jobs = st.builds(
    lambda labels, annotations, spec, framework: {
        "metadata": {
            "name": "test-job",
            "namespace": "default",
            "labels": {"framework": framework, **labels},
            "annotations": annotations,
        },
        "spec": spec,
    },
    maybe(
        {
            "fault-retry-times": texts,
            "fault-scheduling": texts,
            "pod-rescheduling": texts,
            "subHealthyStrategy": st.just("hotSwitch"),
            "super-pod-affinity": st.just("soft"),
            "jobID": texts,
            "app": texts,
        }
    ),
    maybe(
        {
            "recover-strategy": st.sampled_from(["", ",", "recover", "elastic-training,x"]),
            "sp-block": texts,
            "huawei.com/schedule_policy": st.sampled_from(["multilevel", "chip8-node8"]),
            "huawei.com/affinity-config": texts,
        }
    ),
    maybe(
        {
            "schedulerName": texts,
            "successPolicy": st.sampled_from(["", "AllWorkers"]),
            "runPolicy": maybe(
                {
                    "backoffLimit": st.integers(-1, 2),
                    "cleanPodPolicy": st.sampled_from(["", "All", "Running", "None", "Some"]),
                    "ttlSecondsAfterFinished": st.just(1000),
                    "activeDeadlineSeconds": st.integers(-1, 1000),
                    "schedulingPolicy": maybe({"minAvailable": st.integers(-1, 5), "minResources": resources}),
                }
            ),
        }
    ),
    st.sampled_from(["pytorch", "mindspore", "tensorflow"]),
)
pods = st.lists(
    st.tuples(
        st.integers(0, 3),
        maybe(
            {
                "phase": st.sampled_from(["Running", "Succeeded", "Failed", "Unknown", ""]),
                "podIP": texts,
                "containerStatuses": st.sampled_from([[], [{}], [{"name": "ascend", "state": {"terminated": {}}}]]),
            }
        ),
        maybe(
            {"ascend.kubectl.kubernetes.io/ascend-910-configuration": st.sampled_from(["", "{", '{"devices":[{}]}'])}
        ),
    ),
    max_size=6,
)


LEADERS = {"pytorch": "Master", "mindspore": "Scheduler", "tensorflow": "Chief"}


@settings(max_examples=100, deadline=None)
@given(jobs, replica, st.one_of(st.none(), replica), st.integers(0, 3), pods)
def test_settles(
    job: Object,
    leader: Object,
    workers: Object | None,
    replicas: int,
    fates: list[tuple[int, Object, dict[str, str]]],
) -> None:
    async def test() -> None:
        bench = Bench()
        specs: Object = {LEADERS[job["metadata"]["labels"]["framework"]]: leader}
        if workers is not None:
            specs["Worker"] = {**workers, "replicas": replicas}
        job["spec"]["replicaSpecs"] = specs
        await bench.submit(job)
        for number, status, chips in [(0, {}, {}), *fates]:
            names = sorted(bench.pods())
            if names:
                name = names[number % len(names)]
                bench.kube.set_status(POD, name, status)
                bench.kube.annotate(POD, name, chips)
            await bench.settle()
            bench.admit()
            await bench.settle()
            assert bench.job()["status"]["conditions"]
        event("pods" if bench.pods() else "no pods")
        event(bench.state)

    aio.run(test())
