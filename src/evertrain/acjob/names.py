"""Names that are visible on the wire: labels, annotations, resources and constants of AscendJob and around it."""

from __future__ import annotations

GROUP = "mindxdl.gitee.com"
VERSION = "v1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "AscendJob"
CONTROLLER = "ascendjob-controller"

CONTAINER = "ascend"
PORT_NAME = "ascendjob-port"
DEFAULT_PORT = 2222
MAX_REPLICAS = 20000

# Replica types.
MASTER, CHIEF, SCHEDULER, WORKER = "Master", "Chief", "Scheduler", "Worker"
PYTORCH, MINDSPORE, TENSORFLOW = "pytorch", "mindspore", "tensorflow"
LEADERS = {PYTORCH: MASTER, MINDSPORE: SCHEDULER, TENSORFLOW: CHIEF}
"""The replica type, by framework, of which there is one pod and which has the service."""

# Labels of a job.
FRAMEWORK = "framework"
FAULT_SCHEDULING = "fault-scheduling"
FAULT_RETRY_TIMES = "fault-retry-times"
POD_RESCHEDULING = "pod-rescheduling"
PROCESS_RECOVER_ENABLE = "process-recover-enable"
SUB_HEALTHY_STRATEGY = "subHealthyStrategy"
HOT_SWITCH = "hotSwitch"
SUPER_POD_AFFINITY = "super-pod-affinity"
SCALE_OUT_TYPE = "scaleout-type"
SCALING_RULE = "mind-cluster/scaling-rule"
SCALING_GROUP = "mind-cluster/group-name"
JOB_ID, APP = "jobID", "app"
SOFT_SHARE = tuple(f"huawei.com/scheduler.softShareDev.{name}" for name in ("aicoreQuota", "hbmQuota", "policy"))

# Annotations of a job.
RECOVER_STRATEGY = "recover-strategy"
JOINING_STRATEGIES = frozenset({"recover", "recover-in-place", "elastic-training"})
"""With these, processes that are left take in new ones."""
STANDBY_PODS = "standby-pods"
"""How many pods stand by, started, for those that are replaced."""
MAX_STANDBY_PODS = 16
SP_BLOCK = "sp-block"
SCHEDULE_POLICY = "huawei.com/schedule_policy"
AFFINITY_CONFIG = "huawei.com/affinity-config"
MULTILEVEL = "multilevel"
RECOVER_POLICY_PATH = "huawei.com/recover_policy_path"
PLATFORM_STRATEGY = "ProcessRecoverStrategy"
"""On the PodGroup: a platform outside of the cluster deals with the job's faults."""

# Labels and annotations of pods.
GROUP_NAME_LABEL = "group-name"
OPERATOR_NAME = "training.kubeflow.org/operator-name"
JOB_NAME, OLD_JOB_NAME = "training.kubeflow.org/job-name", "job-name"
REPLICA_TYPE, OLD_REPLICA_TYPE = "training.kubeflow.org/replica-type", "replica-type"
REPLICA_INDEX, OLD_REPLICA_INDEX = "training.kubeflow.org/replica-index", "replica-index"
SELECTED = (OPERATOR_NAME, JOB_NAME, REPLICA_TYPE, REPLICA_INDEX)
"""By these the operator finds its pods and services again."""
JOB_ROLE = "training.kubeflow.org/job-role"
POD_VERSION = "version"
RANK_INDEX = "hccl/rankIndex"
GROUP_ANNOTATION = "scheduling.k8s.io/group-name"
TASK_SPEC = "volcano.sh/task-spec"
POD_TYPE, BACKUP, STANDBY = "podType", "backup", "standby"
IN_HOT_SWITCH = "inHotSwitchFlow"
OPERATOR_ORDER, ORDER_CREATE, ORDER_DELETE = "needOperatorOpe", "create", "delete"
SCHEDULER_ORDER = "needVolcanoOpe"
FAULT_TYPE = "fault-type"
"""Label of a pod: ClusterD knows of a fault of it."""
BACKUP_NAME, BACKUP_SOURCE = "backupNewPodName", "backupSourcePodName"
DEVICE_CONFIGURATIONS = (
    "ascend.kubectl.kubernetes.io/ascend-910-configuration",
    "ascend.kubectl.kubernetes.io/ascend-npu-configuration",
)
HARDWARE_TYPE = "mind-cluster/hardware-type"
SUPER_POD_RANK, SUPER_POD_ID = "super-pod-rank", "super-pod-id"

# Resources.
NPU_PREFIX = "huawei.com/"
NPU, ASCEND_910 = "huawei.com/npu", "huawei.com/Ascend910"
WHOLE_NPUS = frozenset({NPU, ASCEND_910, "huawei.com/Ascend310", "huawei.com/Ascend310P"})
DYNAMIC_NPU = "huawei.com/npu-core"

VOLCANO = "volcano"
DEFAULT_QUEUE = "default"
CLUSTERD_NAMESPACE, CLUSTERD_SERVICE = "mindx-dl", "clusterd-grpc-svc"
CLUSTERD_ADDRESS = "evertrain.dev/address"
"""Annotation on the Service: HOST:PORT at which ClusterD serves who is not in a pod, where that is another."""
CLUSTERD_DOMAIN = f"{CLUSTERD_SERVICE}.{CLUSTERD_NAMESPACE}.svc.cluster.local"
TOKEN_VARIABLE, TOKEN_SECRET, TOKEN_KEY = "EVERTRAIN_TOKEN", "-clusterd-token", "token"
"""The variable with the job's token for ClusterD, the middle of the name of the Secret that holds it, its key."""
TLS_VARIABLES = {"TASKD_TLS_CA": "ca.crt", "TASKD_TLS_CERT": "tls.crt", "TASKD_TLS_KEY": "tls.key"}
TLS_VOLUME, TLS_FOLDER = "evertrain-tls", "/etc/evertrain/tls"
"""Certificates in that Secret: the variables that name their files, in this folder of the container that trains."""
RETRY_CONFIG_NAMESPACE, RETRY_CONFIG, RETRY_KEY = "volcano-system", "vcjob-fault-npu-cm", "remain-retry-times"
RANK_TABLE_VOLUME = "ranktable"
PLACE_VOLUME, PLACE_FOLDER, PLACE_FILE = "taskd-place", "/etc/taskd-place", "rank"
PLACE_VARIABLE = "TASKD_PLACE_FILE"
"""Where a pod that stands by reads which place it has; the file is empty until it has one."""
RANK_TABLE_CONFIG = "rings-config-"
