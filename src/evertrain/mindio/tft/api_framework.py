"""The functions that a training framework calls, with the names, defaults and errors that frameworks depend on."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from evertrain.mindio import gloo_workers
from evertrain.mindio.tft import environment, faults, hosting, log, naming
from evertrain.mindio.tft import runtime as runtime_module
from evertrain.mindio.tft.log import logger
from evertrain.mindio.tft.messages import ReplicaGroup
from evertrain.mindio.tft.numbers import MAX_KINDS, MAX_STEP, MAX_WORLD, ReportState, is_int
from evertrain.mindio.tft.processor import Settings
from evertrain.mindio.tft.runtime import FRAMEWORKS, give_up, runtime

# --- life ------------------------------------------------------------------------------------------------------------


def tft_init_processor(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """Every rank, once, after its device is set and its process group exists. A mistake here ends the process."""
    try:
        _init_processor(rank, world_size, enable_local_copy, enable_tls, tls_info, enable_uce, enable_arf, enable_zit)
    except Exception as error:
        give_up(f"tft_init_processor: {error}")


def _init_processor(
    rank: int, world_size: int, local_copy: bool, enable_tls: bool, tls_info: str, uce: bool, arf: bool, zit: bool
) -> None:
    if not (is_int(rank) and is_int(world_size) and 0 <= rank < world_size <= MAX_WORLD):
        raise ValueError(
            f"rank {rank!r} and world_size {world_size!r}: 0 <= rank < world_size <= {MAX_WORLD} is needed"
        )
    mindspore = environment.mindspore()
    if mindspore and (local_copy or zit):
        raise ValueError("with MindSpore there is neither a local copy nor elastic training")
    settings = Settings(
        rank=rank,
        world_size=world_size,
        local_copy=bool(local_copy),
        uce=bool(uce),
        arf=bool(arf),
        zit=bool(zit),
        token=environment.token(),
        context=_tls_context(tls_info) if enable_tls else None,
        mindspore=mindspore,
    )
    runtime.init_processor(
        settings, hosting.stand_by(settings, lambda: _tls_context(tls_info, server=True) if enable_tls else None)
    )
    runtime.close_standby = hosting.close_standby
    naming.apply()


def _tls_context(tls_info: str, server: bool = False) -> Any:
    from evertrain.mindio import tls

    make = tls.server_context if server else tls.client_context
    return make(tls.parse_tls_info(tls_info), runtime.decrypt)


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """Every rank. Connects to the controller and registers; if that can't be done the process ends."""
    try:
        processor = runtime.processor
        if processor is None:
            raise Exception("call tft_init_processor first")
        if processor.running:
            raise Exception("the processor was started before")
        if not is_int(port) or not 1024 <= port <= 65535:
            raise ValueError(f"port {port!r}: a number from 1024 to 65535 is needed")
        if not isinstance(master_ip, str) or not master_ip:
            raise ValueError("master_ip: the controller's address is needed")
        if not isinstance(local_ip, str):
            raise ValueError(f"local_ip {local_ip!r}: an address of this host is needed, or none")
        processor.start(master_ip, port, local_ip or _own_address(master_ip))
    except Exception as error:
        give_up(f"tft_start_processor: {error}")


def _own_address(master_ip: str) -> str:
    """By which peers could reach this host: the address from which the controller is reached. Empty on loopback."""
    try:
        family, _, _, _, address = socket.getaddrinfo(master_ip, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: asks the kernel for the route
            own: str = probe.getsockname()[0]
    except OSError:
        return ""
    return "" if own.startswith("127.") or own == "::1" else own


def tft_destroy_processor() -> None:
    """Safe to call at any time; at exit it is called anyway."""
    runtime.destroy_processor()
    if not hosting.leading():
        log.stop()


def set_mindio_export_version(framework_type: str) -> None:
    if framework_type not in FRAMEWORKS:
        raise Exception(f"framework_type must be one of {', '.join(FRAMEWORKS)}, not {framework_type!r}")
    runtime.framework_type = framework_type
    os.environ["TTP_STOP_CLEAN_BEFORE_DUMP"] = "1"


def get_mindio_export_version() -> str | None:
    return runtime.framework_type


def get_device() -> Any:
    """The device that the process had at `tft_init_processor`."""
    return runtime.device


# --- the training loop -----------------------------------------------------------------------------------------------


def tft_set_optimizer_replica(rank: int, replica_info: list) -> None:
    """How this rank's optimizer state is kept: one dict for each kind, dense first, then experts."""
    if not is_int(rank) or not 0 <= rank < MAX_WORLD:
        raise Exception(f"rank {rank!r} is not between 0 and {MAX_WORLD - 1}")
    if not isinstance(replica_info, list) or not 1 <= len(replica_info) <= MAX_KINDS:
        raise Exception("replica_info must be a list with a dict for each kind of optimizer")
    groups = [_replica_group(info) for info in replica_info]
    processor = runtime.current()
    own, world = processor.settings.rank, processor.settings.world_size
    if rank != own:
        raise Exception(f"rank {rank} can't report its groups here: this process is rank {own}")
    for ranks in (group.rank_list for group in groups):
        if own not in ranks or max(ranks) >= world or len(set(ranks)) < len(ranks):
            raise Exception(f"rank_list must have rank {own} in it, and no rank twice, and none above {world - 1}")
    if not processor.set_replica(groups):
        raise Exception("the replica groups could not be reported: there is no link to a controller")


def _replica_group(info: Any) -> ReplicaGroup:
    if not isinstance(info, dict):
        raise Exception(f"each entry of replica_info must be a dict, not {type(info).__name__}")
    missing = [key for key in ("rank_list", "replica_cnt", "replica_shift") if key not in info]
    if missing:
        raise Exception(f"replica_info lacks {', '.join(missing)}")
    ranks, count, shift = info["rank_list"], info["replica_cnt"], info["replica_shift"]
    if not isinstance(ranks, list) or not ranks or not all(is_int(rank) and 0 <= rank < MAX_WORLD for rank in ranks):
        raise Exception("rank_list must be a list of ranks")
    if not is_int(count) or not 1 <= count <= len(ranks):
        raise Exception(f"replica_cnt {count!r} is not between 1 and the number of ranks, {len(ranks)}")
    if environment.mindspore() and count != len(ranks):
        raise Exception(f"with MindSpore replica_cnt {count} must equal the number of ranks, {len(ranks)}")
    if not is_int(shift) or shift < 0:
        raise Exception(f"replica_shift {shift!r} must be a number, 0 or more")
    return ReplicaGroup(rank_list=ranks, replica_cnt=count, replica_shift=shift)


def tft_set_dp_group_info(rank: int, dp_rank_list: list) -> None:
    """The original data-parallel group; matters for elastic training if every replica group is larger than it."""
    if not isinstance(dp_rank_list, list) or not all(is_int(entry) for entry in dp_rank_list):
        raise Exception("dp_rank_list must be a list of ranks")
    if rank not in dp_rank_list:
        raise Exception(f"rank {rank!r} is not in its own data-parallel group {dp_rank_list}")
    processor = runtime.current()
    if all(len(group.rank_list) > len(dp_rank_list) for group in processor.replica_groups) and not (
        processor.set_dp_group(dp_rank_list)
    ):
        raise Exception("the data-parallel group could not be reported: there is no link to a controller")


def tft_start_copy_os() -> None:
    with runtime.shielded():
        runtime.current().steps.start_copy()


def tft_start_updating_os(backup_step: int = -1) -> None:
    """Immediately before the optimizer's update. Blocks while the step is locked for a recovery; then raises
    RuntimeError("FORCE STOP …")."""
    if not is_int(backup_step) or not -1 <= backup_step <= MAX_STEP:
        raise Exception(f"backup_step {backup_step!r} must be -1 or a step")
    with runtime.shielded():
        runtime.current().steps.start_updating(backup_step)


def tft_end_updating_os(step: int) -> None:
    """Immediately after the update, when the device is done with it."""
    if not is_int(step) or not 1 <= step <= MAX_STEP:
        raise Exception(f"step {step!r} must be 1 or more")
    with runtime.shielded():
        runtime.current().end_updating(step)


def tft_reset_limit_step() -> None:
    runtime.current().steps.lift()


def tft_pause_train(cur_step: int) -> None:
    """The last statement of every iteration."""
    if not is_int(cur_step) or cur_step < 0:
        logger.warning("tft_pause_train: step %r is ignored", cur_step)
        return
    processor = runtime.processor
    if processor is not None:
        with runtime.shielded():
            processor.main.pause_point(cur_step)


def tft_set_step_args(args: Any) -> None:
    """What callbacks get as `args`."""
    if args is None:
        return
    if runtime.framework_type:
        logger.warning("tft_set_step_args is ignored with %s: callbacks get the arguments of the training function",
                       runtime.framework_type)  # fmt: skip
        return
    if runtime.processor is not None and runtime.processor.steps.dumping:
        raise Exception("the dying-gasp checkpoint is being written: its arguments can't be changed")
    runtime.callbacks.args = args


def tft_report_load_ckpt_step(step: int) -> None:
    """Inside the repair callback: a checkpoint of this step was loaded instead of a repair."""
    if not is_int(step) or not 1 <= step <= MAX_STEP:
        raise Exception(f"step {step!r} must be 1 or more")
    runtime.current().rank.load_step = step


# --- exceptions and actions ------------------------------------------------------------------------------------------


def tft_report_error(error_type: int, error_code: str = "") -> None:
    """`error_type` is the value of a ReportState; the member itself is taken as well."""
    try:
        state = error_type if isinstance(error_type, ReportState) else ReportState(error_type)
    except ValueError:
        raise Exception(f"error_type {error_type!r} is no value of ReportState") from None
    if not isinstance(error_code, str):
        raise Exception("error_code must be a string")
    processor = runtime.current()
    processor.report(state, error_code)
    if state == ReportState.RS_UNKNOWN:
        processor.main.wait_exit(environment.action_limit())


def tft_wait_next_action() -> int:
    """Block until the controller has decided: 0 try again, 1 exit."""
    return runtime.current().main.wait_cleaned().value


def tft_wait_repair_action() -> int:
    """The training thread holds nothing that a repair could need. Block until the recovery is over: 0 or 1."""
    return runtime.current().main.wait_resumed().value


def tft_get_repair_step() -> int:
    return runtime.processor.rank.repair_step if runtime.processor is not None else 0


def tft_get_repair_type() -> str:
    return runtime.current().rank.repair_name


def tft_is_reboot_node() -> bool:
    """This process joined a job that has recovered before: it replaces another."""
    return runtime.processor is not None and runtime.processor.reborn


def tft_get_reboot_type() -> str:
    return "hot switch" if runtime.processor is not None and runtime.processor.hot_switch else "arf"


def tft_register_exception_handler(fault_pattern: str, fault_type: str, fault_handle: Callable[[str], str]) -> None:
    """A text that marks a fault, the name of its ReportState, and what tells its class, normally the pattern."""
    faults.register(fault_pattern, fault_type, fault_handle)


# --- callbacks -------------------------------------------------------------------------------------------------------


def tft_register_rename_handler(func: Callable, ctx: Any = None) -> None:
    runtime.callbacks.register("rename", func, ctx)


def tft_register_save_ckpt_handler(func: Callable, ctx: Any = None) -> None:
    runtime.callbacks.register("save_ckpt", func, ctx)


def tft_register_exit_handler(func: Callable, ctx: Any = None) -> None:
    runtime.callbacks.register("exit", func, ctx)


def tft_register_stop_handler(func: Callable, ctx: Any = None) -> None:
    runtime.callbacks.register("stop", func, ctx)


def tft_register_clean_handler(func: Callable, ctx: Any = None) -> None:
    runtime.callbacks.register("clean", func, ctx)


def tft_register_rebuild_group_handler(func: Callable, ctx: Any = None) -> None:
    runtime.callbacks.register("rebuild_group", func, ctx)


def tft_register_repair_handler(func: Callable, ctx: Any = None) -> None:
    runtime.callbacks.register("repair", func, ctx)


def tft_register_rollback_handler(func: Callable, ctx: Any = None) -> None:
    runtime.callbacks.register("rollback", func, ctx)


def tft_register_stream_sync_handler(func: Callable, ctx: Any = None) -> None:
    runtime.callbacks.register("stream_sync", func, ctx)


def tft_register_zit_upgrade_rollback_handler(func: Callable, ctx: Any = None) -> None:
    runtime.callbacks.register("zit_upgrade_rollback", func, ctx)


def tft_register_zit_upgrade_repair_handler(func: Callable, ctx: Any = None) -> None:
    runtime.callbacks.register("zit_upgrade_repair", func, ctx)


def tft_register_zit_upgrade_rebuild_handler(func: Callable, ctx: Any = None) -> None:
    runtime.callbacks.register("zit_upgrade_rebuild", func, ctx)


def tft_register_zit_downgrade_rebuild_handler(func: Callable, ctx: Any = None) -> None:
    runtime.callbacks.register("zit_downgrade_rebuild", func, ctx)


def tft_register_decrypt_handler(decryptor: Callable[[str], str] | None) -> None:
    """Turns the ciphertext of tlsPkPwd into the password. None: it is plain text."""
    if decryptor is None:
        return
    if not callable(decryptor):
        raise TypeError(f"the decrypt handler must be callable, not {type(decryptor).__name__}")
    runtime.decrypt = decryptor


def install_exit_hooks() -> None:
    """When the interface is imported. A process that ends without a word would be taken for a fault."""
    naming.lengthen_torchrun()
    atexit.register(hosting.destroy_controller)
    atexit.register(_at_exit)
    runtime_module.before_exit = _before_exit


def _at_exit() -> None:
    # An uncaught exception leaves this mark. Such a process is missed, and must not say that it is done.
    runtime.destroy_processor(done=not hasattr(sys, "last_value"))
    log.stop()
    if "torch" in sys.modules:
        gloo_workers.settle()


def _before_exit() -> None:
    runtime.destroy_processor(done=False)
    hosting.destroy_controller()
