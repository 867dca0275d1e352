"""The environment variables of TaskD, read in one place. What is unset, no number or out of range means the default."""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
from pathlib import Path

from evertrain.taskd.codes import CLUSTERD_PORT, LOCAL_HOST, MANAGER_PORT, PROXY_PORT
from evertrain.taskd.ip import host_problem, with_brackets
from evertrain.taskd.net.security import Certificates, Security

log = logging.getLogger(__name__)


def is_on(name: str) -> bool:
    return os.environ.get(name) == "on"


def number(name: str, low: int, high: int, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high:
        return int(text)
    if text:
        _tell_unusable(name, text, low, high, default)
    return default


@functools.cache
def _tell_unusable(name: str, text: str, low: int, high: int, default: int) -> None:
    """Once: some are asked for again and again."""
    log.warning("%s: a number from %d to %d is needed, not %.50r; %d is taken", name, low, high, text, default)


# What the job wants.


def process_enable() -> bool:
    """Whether processes are recovered at all: the controller runs, and ClusterD's signals are asked for."""
    return os.environ.get("TASKD_PROCESS_ENABLE") != "off"


def manager_restart() -> bool:
    """Whether a manager that was killed is started again."""
    return os.environ.get("TASKD_MANAGER_RESTART") != "off"


def process_recover() -> bool:
    return is_on("PROCESS_RECOVER")


def strategies() -> list[str]:
    """What the operator wrote for `recover-strategy`, as far as it can be told from the environment."""
    return [name.strip() for name in os.environ.get("HIGH_AVAILABILITY", "").split(",") if name.strip()]


def elastic_training() -> bool:
    return "elastic-training" in strategies()


def in_place() -> bool:
    return is_on("ENABLE_RESTART_FAULT_PROCESS")


def job_id() -> str:
    return os.environ.get("MINDX_TASK_ID", "")


# Warm spares.


def warm_spares() -> int:
    """How many processes an agent for PyTorch keeps ready to replace one that fails."""
    return number("TASKD_WARM_SPARES", 0, 1024, 1)


def warm_imports() -> str:
    """Modules, separated by commas, that a spare imports beyond torch."""
    return ",".join(name for name in ("mindio_ttp.framework_ttp", os.environ.get("TASKD_WARM_IMPORTS", "")) if name)


def place_file() -> str:
    """In a pod that stands by: the file that will say whose place it takes. Empty in all others."""
    return os.environ.get("TASKD_PLACE_FILE", "")


# Addresses.


def through_local_proxy() -> bool:
    """Everything goes to a proxy beside us, which does the encryption."""
    return is_on("LOCAL_PROXY_ENABLE")


def manager_host() -> str:
    """Where the manager listens. ValueError if nobody can listen there, or everybody could."""
    host = LOCAL_HOST if through_local_proxy() else with_brackets(os.environ.get("POD_IP") or LOCAL_HOST)
    if problem := host_problem(host):
        raise ValueError(f"POD_IP: {problem}")
    return host


def manager_port() -> int:
    return number("TASKD_MANAGER_PORT", 1, 65535, MANAGER_PORT)


def proxy_host() -> str:
    """Where the proxy of this pod listens. Pods that share a host have loopback addresses of their own."""
    pod = os.environ.get("POD_IP", "")
    try:
        own = ipaddress.ip_address(pod).is_loopback
    except ValueError:
        own = False
    return with_brackets(os.environ.get("TASKD_PROXY_IP") or (pod if own else LOCAL_HOST))


def proxy_port() -> int:
    return number("TASKD_PROXY_PORT", 1, 65535, PROXY_PORT)


def clusterd() -> str:
    """The address of ClusterD, empty if there is none."""
    host = LOCAL_HOST if through_local_proxy() else with_brackets(os.environ.get("MINDX_SERVER_IP", ""))
    return f"{host}:{clusterd_port()}" if host else ""


def clusterd_port() -> int:
    return number("MINDX_SERVER_PORT", 1, 65535, CLUSTERD_PORT)


def clusterd_name() -> str:
    """What its certificate calls it; the address is the service's, which no certificate knows."""
    return os.environ.get("MINDX_SERVER_DOMAIN", "")


def security() -> Security:
    """The token of the job, and certificates where they are mounted."""
    names = ("TASKD_TLS_CA", "TASKD_TLS_CERT", "TASKD_TLS_KEY")
    files = [os.environ.get(name, "") for name in names]
    if any(files) and not all(files):
        missing = ", ".join(name for name, file in zip(names, files, strict=True) if not file)
        raise ValueError(f"TLS needs all of {', '.join(names)}; not set: {missing}")
    certificates = Certificates(*map(Path, files)) if all(files) else None
    if certificates is not None:
        certificates.check()
    return Security(os.environ.get("EVERTRAIN_TOKEN", ""), certificates)


# Folders that the cluster mounts.


def reset_folder() -> Path:
    """With what the cluster says about chips that are reset and pods that are replaced: reset.json, restartType."""
    return Path(os.environ.get("TASKD_RESET_DIR") or "/user/restore/reset/config")


def rank_table_folder() -> Path:
    """With the number of the rank table: version."""
    return Path(os.environ.get("TASKD_RANK_TABLE_DIR") or "/user/serverid/devindex/config")


def trace_file() -> Path:
    """With the timings that are wanted, where ClusterD does not say it: JSON."""
    return Path(os.environ.get("TASKD_DATATRACE_DIR") or "/user/cluster-info/datatrace-config") / "profilingSwitch"


# Times.


def report_fault_timeout() -> int | None:
    """Seconds after which an agent whose fault nobody has handled gives up; None: never."""
    seconds = number("TASKD_REPORT_FAULT_TIMEOUT", 300, 600, 0)
    return seconds or None


def pause_timeout() -> int:
    """Seconds that a pause may last if nobody says."""
    text = os.environ.get("HCCL_CONNECT_TIMEOUT", "").strip()
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    return min(int(value * 2.5), 7200) if value > 0 else 600
