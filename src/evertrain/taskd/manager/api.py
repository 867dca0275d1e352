"""`init_taskd_manager` and `start_taskd_manager`, as users' `manager.py` calls them."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from typing import Any

from evertrain import aio
from evertrain.taskd import environment
from evertrain.taskd import log as logs
from evertrain.taskd.answers import needed
from evertrain.taskd.ip import host_problem, port, with_brackets
from evertrain.taskd.manager import plugins, successor
from evertrain.taskd.manager.decide import MOST_NODES, MOST_RANKS
from evertrain.taskd.manager.shell import Config, Manager

log = logging.getLogger(__name__)

taskd_manager: Config | None = None


def init_taskd_manager(config: dict[str, Any]) -> bool:
    """Prepare the manager of the job. False, with the reason in the log, if the configuration can't be used.

    `job_id`, `node_nums` and `proc_per_node` are needed. `plugin_dir` names a folder with plugins, `cluster_infos` may
    name ClusterD as {"ip", "port", "name", "role"}, or a list of such; the environment is asked otherwise.
    """
    global taskd_manager
    try:
        logs.open_part("manager")
        needed(config)["taskd_enable"] = "on" if environment.process_enable() else "off"
        if environment.process_recover():
            config["fault_recover"] = "on"
        prepared = _prepared(config)
    except Exception as error:  # manager.py looks at the answer
        log.error("failed to init taskd manager with ret code:f1: %s", str(error))
        return False
    if taskd_manager is None:
        taskd_manager = prepared
    log.info("successfully init taskd manager")
    return True


def _prepared(config: dict[str, Any]) -> Config:
    nodes, per_node = _count(config, "node_nums"), _count(config, "proc_per_node")
    if nodes > MOST_NODES or nodes * per_node > MOST_RANKS:
        most = f"{MOST_NODES} nodes with {MOST_RANKS} processes"
        raise ValueError(f"node_nums, proc_per_node: a job has up to {most}, not {nodes} with {nodes * per_node}")
    job = config.get("job_id")
    if not isinstance(job, str) or not job:
        raise ValueError("job_id: the id of the job is needed, usually the environment's MINDX_TASK_ID")
    for key in ("plugin_dir", "fault_recover"):
        if not isinstance(config.get(key, ""), str | None):
            raise TypeError(f"{key}: a string is needed, not {config[key]!r}")
    address, problem = _usable(config.get("cluster_infos"))
    return Config(
        job=job,
        nodes=nodes,
        per_node=per_node,
        recovers_processes=bool(config.get("fault_recover")),
        enabled=config["taskd_enable"] == "on",
        listen=f"{environment.manager_host()}:{environment.manager_port()}",
        clusterd=address,
        no_clusterd=problem,
        security=environment.security(),
        plugins=plugins.load(config.get("plugin_dir") or ""),
        reset_file=environment.reset_folder() / "reset.json",
    )


def _count(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key}: a number from 1 is needed, not {value!r}")
    return value


def _clusterd(infos: Any) -> str:
    if not infos:
        return ""
    for info in infos if isinstance(infos, list) else [infos]:
        if not isinstance(info, dict):
            raise TypeError(f"cluster_infos: {info!r} is not a dict with ip, port, name and role")
        if str(info.get("name", "")).lower() in ("", "clusterd") and info.get("ip"):
            try:
                return f"{with_brackets(str(info['ip']))}:{port(info.get('port'), environment.clusterd_port())}"
            except ValueError as error:
                raise ValueError(f"cluster_infos: {error}") from None
    return ""


def _usable(infos: Any) -> tuple[str, str]:
    """The address of ClusterD; or what is wrong with it."""
    named = _clusterd(infos)
    address = named or environment.clusterd()
    if address and (problem := host_problem(address.rpartition(":")[0])):
        return "", f"{'cluster_infos' if named else 'MINDX_SERVER_IP'}: {problem}"
    return address, ""


def start_taskd_manager() -> bool:
    """Do the manager's work until the job is over or SIGTERM comes. False if it could not begin or failed.

    A `manager.py` that is killed is started again.
    """
    logs.open_run()
    if taskd_manager is None:
        log.error("Manager is not initialized. Please call init_manager first.")
        return False
    # A program that does more than `manager.py` is not for us to start again.
    own = sys._getframe(1).f_globals.get("__name__") == "__main__"
    in_main = threading.current_thread() is threading.main_thread()
    try:
        with successor.standing_by(environment.manager_restart() and own and in_main):
            return aio.run(_run(taskd_manager))
    except Exception as error:
        log.error("failed to start manager, error:%s", str(error))
        return False


async def _run(config: Config) -> bool:
    manager = Manager(config)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            name = signal.Signals(number).name
            asyncio.get_running_loop().add_signal_handler(number, manager.leave, f"{name} came")
    end = await manager.run()
    if end.ok:
        log.info("successfully start taskd manager; it ends: %s", end.reason)
    else:
        log.error("failed to start taskd manager with ret code:f1: it ends: %s", end.reason)
    return end.ok
