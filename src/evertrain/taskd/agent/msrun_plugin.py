"""The launcher's part in jobs that have no manager: what to do is read from the cluster's mounted files.

msrun falls back to it where TaskD's agent can't be used. On the first node it also follows ClusterD (`legacy`), with
the MindIO controller in its process.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from evertrain.taskd import environment, legacy, proxy_api
from evertrain.taskd import log as logs
from evertrain.taskd.agent import common, pids, reset_files
from evertrain.taskd.agent.msrun import Msrun, StartFailed
from evertrain.taskd.agent.reset_files import POD_RESCHEDULE, FaultStatus, Reset, ResetFiles
from evertrain.taskd.codes import LOCAL_HOST

log = logging.getLogger(__name__)

LOOK = 0.5
"""Seconds between looks at the files: a mount announces nothing."""
START_LIMIT = 900.0
"""Seconds within which the faults that hinder a start have to be dealt with."""
NOTICE = 120.0
"""Seconds within which the cluster has to say that a failed process is to be restarted."""
LAST_WORDS = 10.0
"""Seconds that the others of a failed process have: they may be saving a checkpoint. Not waited if none runs."""


class _Leave(Exception):
    """The work is over, without success."""


class MSRunPlugin:
    def __init__(self) -> None:
        self._msrun = Msrun()
        self._files = ResetFiles.mounted()
        self._now = reset_files.EMPTY
        """The last file that could be read."""
        self._before = reset_files.EMPTY
        """The file as of the last time that something was done about it."""
        self._version = reset_files.NO_VERSION
        """Of the rank table that the running processes know."""
        self._stopped = False
        """All processes are ended until the chips work again."""
        self._failed_at: float | None = None
        self._client: legacy.DLRecoverManager | None = None
        self._rank = "0"

    def register_callbacks(self, operator: str, func: Callable[..., Any]) -> None:
        self._msrun.register(operator, func)

    def start(self) -> None:
        """Ends the process: with 0 when all of its processes have succeeded, else with 1."""
        self._msrun.require_all()
        self._rank = common.server_rank("MS_NODE_RANK")
        logs.open_part(f"agent-{self._rank}")
        self._start_proxy()
        try:
            code = self._run()
        finally:
            if self._client is not None:
                self._client.close()
            proxy_api.destroy_taskd_proxy()
            self._msrun.close()
        sys.exit(code)

    def _start_proxy(self) -> None:
        """For workers in the training processes. There may be no manager that it could join."""
        config = {"UpstreamAddr": os.environ.get("MS_SCHED_HOST") or LOCAL_HOST, "ServerRank": self._rank}
        threading.Thread(target=proxy_api.init_taskd_proxy, args=(config,), name="taskd-proxy", daemon=True).start()

    @property
    def _is_first(self) -> bool:
        return int(self._rank) == 0

    def _run(self) -> int:
        self._wait_to_start()
        if self._is_first:
            self._follow_clusterd()
        try:
            self._start_all()
            while not self._round():
                self._msrun.wait(LOOK)
        except (_Leave, StartFailed) as why:
            log.error("the launcher exits: %s", str(why))
            print(f"taskd: the launcher exits: {why}", file=sys.stderr, flush=True)
            self._msrun.kill_all()
            return 1
        self._msrun.kill_all()
        self._msrun.wait_for_scheduler()
        return 0

    def _wait_to_start(self) -> None:
        count = environment.number("MS_LOCAL_WORKER", 1, 4096, 0)
        local_ranks = range(int(self._rank) * count, (int(self._rank) + 1) * count)
        end = time.monotonic() + START_LIMIT
        while not reset_files.may_start(self._read(), local_ranks):
            if time.monotonic() > end:
                raise ValueError(f"faults of this node were not dealt with in {START_LIMIT:g} s: {self._now}")
            time.sleep(LOOK)

    def _follow_clusterd(self) -> None:
        try:
            self._client = legacy.from_environment()
        except ValueError as error:
            log.warning("ClusterD is not followed: %s", str(error))
            return
        self._client.on_kill = self._msrun.wake
        self._client.start()

    def _read(self) -> Reset:
        self._now = self._files.reset() or self._now
        return self._now

    def _start_all(self) -> None:
        self._before, self._version = self._read(), self._files.version()
        self._msrun.start_all()
        self._stopped, self._failed_at = False, None

    # One look at everything.

    def _round(self) -> bool:
        """True when all is done. `_Leave` if it can't go on."""
        if self._client is not None and self._client.killed.is_set():
            raise _Leave("ClusterD ends the job")
        if not self._msrun.look():
            return False
        now = self._read()
        status = reset_files.fault_status(now, self._before, [each.rank for each in self._msrun.processes])
        if now.graceful_exit == 1 != self._before.graceful_exit:
            self._end_gracefully()
        if self._msrun.succeeded and not self._stopped:
            return True
        if status.is_fault:
            self._local_fault(status)
        elif status.is_unrecovered or self._stopped:
            self._chips_reset()
        elif status.is_retried:
            self._pods_replaced()
        elif any(each.failed for each in self._msrun.processes):
            self._failed()
        else:
            self._failed_at = None
            if not now.statuses:  # what is listed from here on is new; a file that was away has not counted back
                self._before = msgspec.structs.replace(now, retry_time=max(now.retry_time, self._before.retry_time))
        return False

    def _end_gracefully(self) -> None:
        log.info("the cluster wants the training to end, so that it can go on elsewhere")
        running = [each.pid for each in self._msrun.running if each.pid is not None]
        pids.grace_exit_pids(running)
        raise _Leave("the cluster has ended the training gracefully")

    def _local_fault(self, status: FaultStatus) -> None:
        faulty = self._now.faulty([each.rank for each in self._msrun.processes])
        if not (status.restart_fault_process and self._may_restart):
            raise _Leave(f"the cluster says that ranks {sorted(faulty)} are faulty")
        new = faulty - self._before.faulty(faulty)
        log.info("ranks %s are restarted", sorted(new))
        chosen = [each for each in self._msrun.processes if each.rank in new]
        self._msrun.kill(chosen)
        self._before = msgspec.structs.replace(self._now, retry_time=self._before.retry_time)
        self._msrun.start([each.local_rank for each in chosen])
        self._failed_at = None

    @property
    def _may_restart(self) -> bool:
        """Single processes, in their pod. Not on the first node, where the controller is."""
        return not self._is_first and environment.in_place()

    def _chips_reset(self) -> None:
        if not self._stopped:
            log.info("chips are being reset, all processes are ended: %s", self._now.statuses)
            self._end_all()
            self._stopped = True
        if self._now.recovered:
            log.info("the chips work again, all processes are started")
            self._begin_again()

    def _pods_replaced(self) -> None:
        """Until the new ones are there, nothing is done: processes may be saving their state."""
        if not self._now.recovered:
            return
        if self._files.restart_type() == POD_RESCHEDULE and self._files.version() <= self._version:
            return
        log.info("pods were replaced (%d times), all processes start again", self._now.retry_time)
        self._end_all()
        self._begin_again()

    def _end_all(self) -> None:
        if self._client is not None:
            self._client.stop_controller()
        self._msrun.kill_all()

    def _begin_again(self) -> None:
        if self._client is not None:
            self._client.restart_controller()
        self._start_all()

    def _failed(self) -> None:
        failed = sorted(each.rank for each in self._msrun.processes if each.failed)
        if self._failed_at is None:
            for each in self._msrun.processes:
                if each.failed:
                    common.told(each.rank, each.pid, self._msrun.cause(each))
            log.error("New fault process detected, fault_rank: %s", failed)
            self._failed_at = time.monotonic()
        limit = NOTICE if self._may_restart else LAST_WORDS
        nobody_left = not self._may_restart and not self._msrun.running
        if nobody_left or time.monotonic() - self._failed_at > limit:
            raise _Leave(f"ranks {failed} have failed")
