"""The environment that the operator gives to the container that trains. Pure.

Three layers: what every job gets, what its framework reads to find the others, what turns recovery on. A variable of
the same name that the user wrote is replaced, with one exception: a job that asks for no chips keeps its own.
"""

from __future__ import annotations

from evertrain.acjob import names
from evertrain.acjob.job import Job, ascend_container, npu_request
from evertrain.kube.port import Object

Variables = dict[str, "str | Object"]
"""By name: a value, or where it comes from (`valueFrom`)."""

MAX_CHIPS = 1024
"""Of a pod. There is no such node; a job that asks for more waits for ever, and needs no list of its ranks."""
PROCESSES = {names.PYTORCH: "LOCAL_WORLD_SIZE", names.MINDSPORE: "MS_LOCAL_WORKER", names.TENSORFLOW: "CM_LOCAL_WORKER"}
"""How many processes a pod has. Only its chips tell us, or a user who writes it: a command may hide it anywhere."""

PYTORCH_TOKENS = {
    "recover": ("recover",),
    "retry": ("retry",),
    "recover-in-place": ("recover",),
    "dump": ("dump",),
    "exit": ("recover",),
    "elastic-training": ("elastic-training",),
}
MINDSPORE_TOKENS = {
    "recover": ("ARF:1",),
    "retry": ("UCE:1", "HCCE:1"),
    "recover-in-place": ("ARF:1",),
    "dump": ("TTP:1",),
    "exit": ("ARF:1",),
}


def environment(
    job: Job, kind: str, index: int, leader: tuple[str, str], clusterd: str, *, token: bool = False
) -> list[Object]:
    """The environment of that pod's `ascend` container: the user's, then ours. `leader` is the address and port of the
    leader's service, `clusterd` the address of ClusterD, `token` says that the job has one to show there."""
    own = ascend_container(job.template(kind)).get("env") or []
    shown: Variables = {}
    if token:
        shown[names.TOKEN_VARIABLE] = {"secretKeyRef": {"name": job.token_secret_name, "key": names.TOKEN_KEY}}
    if job.is_inference_service:
        return _merged(own, _service_variables(job, clusterd) | shown)
    if job.framework == names.MINDSPORE and job.leader is None:
        return list(own)
    variables = _common(job, kind, index, clusterd) | shown
    framework = _framework(job, kind, index, leader, _sizes(job, kind))
    if job.chips[1] == 0:
        written = {variable.get("name") for variable in own}
        framework = {name: value for name, value in framework.items() if name not in written}
    variables |= framework
    written_tft = next((each.get("value") or "" for each in own if each.get("name") == "MS_ENABLE_TFT"), None)
    written_high = next((each.get("value") or "" for each in own if each.get("name") == "HIGH_AVAILABILITY"), None)
    variables |= _recovery(job, written_high, written_tft)
    return _merged(own, variables)


def _merged(own: list[Object], ours: Variables) -> list[Object]:
    kept = [variable for variable in own if variable.get("name") not in ours]
    return kept + [
        {"name": name, "value": value} if isinstance(value, str) else {"name": name, "valueFrom": value}
        for name, value in ours.items()
    ]


def _field(path: str) -> Object:
    return {"fieldRef": {"fieldPath": path}}


def _service_variables(job: Job, clusterd: str) -> Variables:
    return {
        "MINDX_TASK_ID": job.labels[names.JOB_ID],
        "APP_TYPE": job.labels[names.APP],
        "MINDX_SERVER_IP": clusterd,
        "MINDX_SERVER_DOMAIN": names.CLUSTERD_DOMAIN,
    }


def _common(job: Job, kind: str, index: int, clusterd: str) -> Variables:
    template = job.template(kind)
    container = ascend_container(template)
    resource, chips = npu_request(container)
    variables: Variables = {}
    if resource in names.WHOLE_NPUS and not job.is_soft_share:
        variables["ASCEND_VISIBLE_DEVICES"] = _field(f"metadata.annotations['{resource}']")
    variables["MINDX_TASK_ID"] = job.uid
    variables["MINDX_SERVER_IP"] = clusterd
    variables["MINDX_SERVER_DOMAIN"] = names.CLUSTERD_DOMAIN
    variables["HostNetwork"] = _flag((template.get("spec") or {}).get("hostNetwork"))
    if chips > 0:
        if job.labels.get(names.SUPER_POD_AFFINITY) == "soft" and resource != names.NPU:
            variables["HCCL_LOGIC_SUPERPOD_ID"] = _field(f"metadata.annotations['{names.SUPER_POD_RANK}']")
        else:
            block = job.super_pod_block
            pods = max(1, block // chips)
            variables["HCCL_LOGIC_SUPERPOD_ID"] = str(job.rank(kind, index) // pods if block > 0 else 0)
    variables["REPLICA_TYPE"] = kind
    return variables


def _flag(value: object) -> str:
    return "true" if value else "false"


def _sizes(job: Job, kind: str) -> tuple[str, str, str] | None:
    """Processes of a pod, processes in all, local ranks. None with dynamic vNPUs: known only once the chip is cut."""
    resource, chips = job.chips
    if resource == names.DYNAMIC_NPU or chips > MAX_CHIPS:
        return None
    if job.is_soft_share:
        return "1", str(job.training_pods), "0"
    processes = chips or _written_processes(job, kind)
    return str(processes), str(processes * job.training_pods), ",".join(map(str, range(processes)))


def _written_processes(job: Job, kind: str) -> int:
    """Of a pod without chips; one, if nobody says how many. A leader that only coordinates is told by the workers'."""
    for each in (kind, *job.types):
        for variable in ascend_container(job.template(each)).get("env") or ():
            if variable.get("name") == PROCESSES.get(job.framework):
                text = str(variable.get("value") or "")
                number = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0
                if 0 < number <= MAX_CHIPS:
                    return number
    return 1


def _framework(
    job: Job, kind: str, index: int, leader: tuple[str, str], sizes: tuple[str, str, str] | None
) -> Variables:
    rank = str(job.rank(kind, index))
    host, port = leader
    variables: Variables = {}
    if job.framework == names.PYTORCH:
        if sizes is not None:
            variables["LOCAL_WORLD_SIZE"], variables["WORLD_SIZE"], variables["LOCAL_RANK"] = sizes
        return variables | {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": rank}
    is_leader = kind == job.leader
    leader_host: str | Object = _field("status.podIP") if is_leader else host
    if job.framework == names.MINDSPORE:
        if sizes is not None:
            variables["MS_LOCAL_WORKER"], variables["MS_WORKER_NUM"], _ = sizes
        return variables | {
            "MS_SCHED_HOST": leader_host,
            "MS_SCHED_PORT": port,
            "MS_NODE_RANK": rank,
            "MS_SERVER_NUM": "0",
            "MS_ROLE": "MS_SCHED" if is_leader else "MS_WORKER",
            "NPU_POD": _flag(npu_request(ascend_container(job.template(kind)))[1] > 0),
        }
    if sizes is not None:
        variables["CM_LOCAL_WORKER"], variables["CM_WORKER_SIZE"], _ = sizes
    return variables | {
        "CM_CHIEF_IP": leader_host,
        "CM_CHIEF_PORT": port,
        "CM_CHIEF_DEVICE": "0",
        "CM_WORKER_IP": _field("status.podIP"),
        "CM_RANK": rank,
    }


def _recovery(job: Job, written_high: str | None, written_tft: str | None) -> Variables:
    if job.framework not in (names.PYTORCH, names.MINDSPORE):
        return {}
    variables: Variables = {}
    pytorch = job.framework == names.PYTORCH
    tokens = PYTORCH_TOKENS if pytorch else MINDSPORE_TOKENS
    main = "HIGH_AVAILABILITY" if pytorch else "MS_ENABLE_TFT"
    written = written_high if pytorch else written_tft
    found: set[str] | None = None
    if job.strategies:
        known = [strategy for strategy in job.strategies if strategy in tokens]
        found = {token for strategy in known for token in tokens[strategy]}
        if known:
            variables["PROCESS_RECOVER"] = "on"
        if any(strategy != "elastic-training" for strategy in known):
            variables["ELASTIC_PROCESS_RECOVER_ENABLE"] = "1"
        if "recover-in-place" in known:
            variables["ENABLE_RESTART_FAULT_PROCESS"] = "on"
        if pytorch:
            variables["HCCL_ASYNC_ERROR_HANDLING"] = "0"
        else:
            variables["MINDIO_FOR_MINDSPORE"] = "1"
            variables["MS_ENABLE_THM"] = "{HCCL_WATCHDOG:0}"
    if not pytorch and job.labels.get(names.POD_RESCHEDULING) == "on" and (found is not None or written is None):
        found = (found or set()) | {"RSC:1"}
    if job.labels.get(names.SUB_HEALTHY_STRATEGY) == names.HOT_SWITCH:
        if found is None:
            found = {token.strip() for token in (written or "").strip("{} ").split(",") if token.strip()}
        found |= {"recover"} if pytorch else {"ARF:1"}
        if not pytorch:
            variables["MINDIO_FOR_MINDSPORE"] = "1"
        variables["PROCESS_RECOVER"] = "on"
        variables["ELASTIC_PROCESS_RECOVER_ENABLE"] = "1"
    if found is not None:
        joined = ",".join(sorted(found))
        variables[main] = joined if pytorch else f"{{{joined}}}"
    return variables
