"""Names, signatures, errors, environment and log that frameworks depend on."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evertrain.mindio.tft import api_framework, environment, faults, log, messages, numbers, runtime
from evertrain.mindio.tft.callbacks import Callbacks
from evertrain.mindio.tft.processor import Settings
from evertrain.mindio.tft.rank import Life
from mindio_ttp import framework_ttp as tft
from mindio_ttp import mindspore_api
from tests.mindio import tft_controllers
from tests.mindio.tft_controllers import ScriptedController

HANDLERS = [
    "rename", "save_ckpt", "exit", "stop", "clean", "rebuild_group", "repair", "rollback", "stream_sync",
    "zit_upgrade_rollback", "zit_upgrade_repair", "zit_upgrade_rebuild", "zit_downgrade_rebuild",
]  # fmt: skip
FRAMEWORK = [
    "tft_init_controller", "tft_start_controller", "tft_destroy_controller", "tft_init_processor",
    "tft_start_processor", "tft_destroy_processor", "tft_start_updating_os", "tft_start_copy_os",
    "tft_end_updating_os", "tft_set_optimizer_replica", "tft_exception_handler", "tft_set_step_args",
    *[f"tft_register_{name}_handler" for name in [*HANDLERS, "exception", "decrypt"]],
    "tft_report_error", "tft_wait_next_action", "tft_get_repair_step", "tft_get_repair_type", "tft_is_reboot_node",
    "tft_get_reboot_type", "tft_can_do_uce_repair", "tft_reset_limit_step", "tft_pause_train",
    "tft_set_dp_group_info", "tft_report_load_ckpt_step", "OptimizerType", "Action", "ReportState", "RepairType",
]  # fmt: skip
CONTROLLER = [
    "tft_notify_controller_dump", "tft_notify_controller_stop_train", "tft_notify_controller_on_global_rank",
    "tft_notify_controller_prepare_action", "tft_notify_controller_change_strategy", "tft_register_mindx_callback",
    "tft_query_high_availability_switch",
]  # fmt: skip
NAMES = {
    "mindio_ttp.framework_ttp": [*FRAMEWORK, "set_mindio_export_version"],
    "mindio_ttp.framework_ttp.ttp_decorator": [
        *FRAMEWORK, "get_mindio_export_version", "get_device", "tft_wait_repair_action", "save_handler",
        "fault_handles", "fault_types", "set_mindio_export_version",
    ],
    "mindio_ttp.controller_ttp": [
        *CONTROLLER, "tft_init_controller", "tft_start_controller", "tft_destroy_controller",
    ],
    "mindio_ttp.utils": [
        "tft_can_do_uce_repair", "tft_set_update_start_time", "tft_set_update_end_time", "get_l2_hbm_error_time",
    ],
    "mindio_ttp.mindspore_api": ["set_updating", "set_finished"],
}  # fmt: skip


@pytest.mark.parametrize("module", NAMES)
def test_every_name_can_be_imported(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


def test_what_a_star_imports() -> None:
    assert sorted(tft.__all__) == sorted(FRAMEWORK)
    assert sorted(importlib.import_module("mindio_ttp.controller_ttp").__all__) == sorted(CONTROLLER)


@pytest.mark.parametrize(
    ("name", "signature"),
    {
        "tft_init_processor": "(rank, world_size, enable_local_copy, enable_tls=True, tls_info='', enable_uce=True, "
        "enable_arf=False, enable_zit=False)",
        "tft_start_processor": "(master_ip, port, local_ip='')",
        "tft_destroy_processor": "()",
        "tft_start_updating_os": "(backup_step=-1)",
        "tft_end_updating_os": "(step)",
        "tft_start_copy_os": "()",
        "tft_set_optimizer_replica": "(rank, replica_info)",
        "tft_set_dp_group_info": "(rank, dp_rank_list)",
        "tft_set_step_args": "(args)",
        "tft_pause_train": "(cur_step)",
        "tft_report_load_ckpt_step": "(step)",
        "tft_report_error": "(error_type, error_code='')",
        "tft_can_do_uce_repair": "(hbm_error_time, start_time=None, end_time=None)",
        "tft_register_exception_handler": "(fault_pattern, fault_type, fault_handle)",
        "tft_init_controller": "(rank, world_size, enable_local_copy, enable_arf=False, enable_zit=False)",
        "tft_start_controller": "(bind_ip, port, enable_tls=True, tls_info='')",
        "tft_destroy_controller": "()",
        "tft_exception_handler": "(func)",
        "tft_register_decrypt_handler": "(decryptor)",
        "set_mindio_export_version": "(framework_type)",
        **dict.fromkeys(
            ("tft_reset_limit_step", "tft_wait_next_action", "tft_wait_repair_action", "tft_get_repair_step",
             "tft_get_repair_type", "tft_is_reboot_node", "tft_get_reboot_type"), "()"
        ),
        **{f"tft_register_{name}_handler": "(func, ctx=None)" for name in HANDLERS},
        "tft_register_mindx_callback": "(action, func)",
        "tft_notify_controller_stop_train": "(fault_ranks, stop_type='stop', timeout=None)",
        "tft_notify_controller_on_global_rank": "(fault_ranks, time=1)",
        "tft_notify_controller_prepare_action": "(action, fault_ranks=None)",
        "tft_notify_controller_change_strategy": "(strategy, params='')",
        "tft_notify_controller_dump": "()",
        "tft_query_high_availability_switch": "()",
        "tft_set_update_start_time": "(start_time=None)",
        "tft_set_update_end_time": "(end_time=None)",
    }.items(),
)  # fmt: skip
def test_signatures(name: str, signature: str) -> None:
    modules = [importlib.import_module(module) for module in NAMES]
    functions = {getattr(module, name) for module in modules if hasattr(module, name)}
    assert len(functions) == 1, "one function, wherever it is imported from"
    plain = [p.replace(annotation=p.empty) for p in inspect.signature(functions.pop()).parameters.values()]
    assert str(inspect.Signature(plain)) == signature


@pytest.mark.parametrize(
    ("numbered", "names"),
    [
        (numbers.ReportState, "RS_NORMAL RS_RETRY RS_UCE RS_UCE_CORRUPTED RS_HCCL_FAILED RS_INIT_FINISH "
                              "RS_PREREPAIR_FINISH RS_STEP_FINISH RS_UNKNOWN"),
        (numbers.RepairType, "RT_SEND RT_UCE_HIGHLEVEL RT_UCE_LOWLEVEL RT_RECV_REPAIR RT_ROLLBACK RT_LOAD_CKPT "
                             "RT_LOAD_REBUILD"),
        (numbers.OptimizerType, "ATTENTION MOE"),
        (numbers.Action, "RETRY EXIT"),
        (numbers.ControllerRepairType, "DUMP RETRY ARF UPGRADE DOWNGRADE NONE"),
        (numbers.TrainState, "NORMAL ABNORMAL UCE_HIGH UCE_LOW UCE_CORRUPTED OFFLINE ISOLATE INIT_FINISH "
                             "PREREPAIR_FINISH PRECISION_ERROR STEP_FINISH EXIT HCCL_FAILED"),
        (numbers.DataStatus, "UPDATED UPDATING COPYING"),
        (numbers.Result, "OK ERROR WAIT_CHECK STOP_SERVICE TIMEOUT NEED_RETRY DOWNGRADE REPAIR PAUSE SWITCH RERUN"),
        (numbers.FaultType, "UCE PROCESS HCCL"),
        (Life, "BEGIN INITING INITED START RESTART END NORMAL PAUSE DUMP"),
    ],
)  # fmt: skip
def test_numbers(numbered: Any, names: str) -> None:
    assert {member.name: member.value for member in numbered} == {name: n for n, name in enumerate(names.split())}


def test_codes() -> None:
    assert [int(code) for code in numbers.ReportCode] == [0, 201, 404, 405, 406, 499]
    codes = (numbers.RET_OK, numbers.RET_ERROR, numbers.RET_K8S, numbers.RET_PASS, numbers.RET_EXCEPTION)
    assert codes == (0, 1, 2, 3, 4)
    limits = (numbers.MAX_WORLD, numbers.MAX_KINDS, numbers.MAX_PARAM, numbers.MAX_ERROR_CODE, numbers.MAX_STEP)
    assert limits == (100_000, 1000, 1023, 15, 2**63 - 2)


UNIT = messages.RepairUnit(src=0, dst=1, kind=1, repair_type=numbers.RepairType.RT_LOAD_REBUILD.value)
INFO = {"type": [1], "repair_type": 6, "src": [0], "dst": [1], "rank_list": [0, 1]}


@pytest.mark.parametrize(
    ("name", "values", "arguments"),
    [
        ("save_ckpt", (7, [messages.SaveGroup(kind=1, ranks=[0, 2])]),
         (7, [{"type": 1, "ranks": [0, 2]}], "args", "ctx")),
        ("rename", (7,), (7, "args")),
        ("exit", (), ("ctx",)),
        ("stop", (), ("args", "ctx")),
        ("clean", (True,), (True, "args", "ctx")),
        ("rebuild_group", ([3],), ([3], "args", "ctx")),
        ("repair", (7, [UNIT], [0, 1]), (7, True, [1], INFO, "args", "ctx")),
        ("rollback", (7,), (7, "args", "ctx")),
        ("stream_sync", (), ()),
        ("zit_downgrade_rebuild", ([[0, 2]], [0, 1, 2], "param"), ([0, 2], [0, 1, 2], "args", "param")),
        ("zit_upgrade_rebuild", ([3], "param"), ([3], "args", "param")),
        ("zit_upgrade_repair", (7, [UNIT], [0, 1], "param"), (7, True, [1], INFO, "args", "param")),
        ("zit_upgrade_rollback", (7, "param"), (7, "args", "param")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mindspore", [False, True])
def test_what_callbacks_get(
    monkeypatch: pytest.MonkeyPatch, mindspore: bool, name: str, values: tuple, arguments: tuple
) -> None:
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", str(mindspore))
    callbacks, got, used = Callbacks(), [], []
    callbacks.args = "args"
    callbacks.use_device = lambda: used.append(name)
    callbacks.register(name, lambda *args: got.append(args) or 0, "ctx")
    assert getattr(callbacks, name)(*values) == 0
    assert got == [(7, "ctx") if mindspore and name == "rename" else arguments]
    assert bool(used) != name.startswith(("zit", "exit")), "on the device that the process had at the beginning"


@pytest.mark.parametrize("name", HANDLERS)
def test_what_happens_without_a_callback(name: str) -> None:
    values = {"save_ckpt": (7, []), "clean": (True,), "rebuild_group": ([],), "repair": (7, [UNIT], []), "rename": (7,),
              "rollback": (7,), "zit_downgrade_rebuild": ([], [], ""), "zit_upgrade_rebuild": ([], ""),
              "zit_upgrade_repair": (7, [UNIT], [], ""), "zit_upgrade_rollback": (7, "")}  # fmt: skip
    result = getattr(Callbacks(), name)(*values.get(name, ()))
    assert result == {"save_ckpt": 1, "stop": 1, "clean": 4}.get(name, 0)


# --- functions -------------------------------------------------------------------------------------------------------


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ScriptedController]:
    monkeypatch.setenv("TTP_LOG_PATH", str(tmp_path / "logs"))
    with tft_controllers.controller() as scripted:
        runtime.runtime.init_processor(Settings(rank=1, world_size=4), lambda *_: None)
        tft.tft_start_processor(*scripted.address)
        yield scripted
        runtime.reset()
        log.stop()


GOOD = {"rank_list": [0, 1, 2, 3], "replica_cnt": 2, "replica_shift": 0}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rank_list": None}, "rank_list"),
        ({"rank_list": [0, "1"]}, "rank_list"),
        ({"replica_cnt": 0}, "replica_cnt"),
        ({"replica_cnt": 5}, "replica_cnt"),
        ({"replica_cnt": True}, "replica_cnt"),
        ({"replica_shift": -1}, "replica_shift"),
        ({"replica_shift": "0"}, "replica_shift"),
        ({"rank_list": [0, 2], "replica_cnt": 1}, "must have rank 1 in it"),
        ({"rank_list": [1, 4]}, "none above 3"),
        ({"rank_list": [1, 2, 2]}, "no rank twice"),
    ],
)
def test_replica_groups_are_checked(leader: ScriptedController, change: dict, text: str) -> None:
    with pytest.raises(Exception, match=text):
        tft.tft_set_optimizer_replica(1, [{**GOOD, **change}])


def test_replica_groups_and_the_data_parallel_group(leader: ScriptedController) -> None:
    tft.tft_set_optimizer_replica(1, [GOOD])
    assert leader.next(messages.InitReport).groups[0].replica_cnt == 2
    tft.tft_set_dp_group_info(1, [0, 1, 2, 3])  # not smaller than the replica group: of no interest
    tft.tft_set_dp_group_info(1, [1, 3])
    assert leader.next(messages.DpReport).ranks == [1, 3]
    for bad in ((-1, [GOOD]), (2, [GOOD]), (1, []), (1, GOOD), (1, [{"rank_list": [1]}]), (1, [3])):
        with pytest.raises(Exception):  # noqa: B017
            tft.tft_set_optimizer_replica(*bad)
    with pytest.raises(Exception, match="not in its own"):
        tft.tft_set_dp_group_info(1, [0, 2])


def test_with_mindspore_every_rank_holds_everything(
    leader: ScriptedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINDIO_FOR_MINDSPORE", "true")
    with pytest.raises(Exception, match="MindSpore"):
        tft.tft_set_optimizer_replica(1, [GOOD])
    tft.tft_set_optimizer_replica(1, [{**GOOD, "replica_cnt": 4}])
    assert mindspore_api.set_updating(-1) == 0 and mindspore_api.set_finished(1) == 0
    assert mindspore_api.set_finished(0) == 1


def test_steps_are_checked(leader: ScriptedController) -> None:
    for call in (
        lambda: tft.tft_end_updating_os(0),
        lambda: tft.tft_end_updating_os("1"),
        lambda: tft.tft_start_updating_os(-2),
        lambda: tft.tft_report_load_ckpt_step(0),
        lambda: tft.tft_report_error(99),
    ):
        with pytest.raises(Exception):  # noqa: B017
            call()
    tft.tft_pause_train(-1)
    tft.tft_start_copy_os()
    tft.tft_start_updating_os(3)
    tft.tft_end_updating_os(4)
    status = runtime.runtime.processor.rank.status()
    assert (status.step, status.backup_step, status.data_status) == (4, 3, 0)


@pytest.mark.parametrize("state", [tft.ReportState.RS_UCE, tft.ReportState.RS_UCE.value])
def test_errors_are_reported_at_once(leader: ScriptedController, state: Any) -> None:
    tft.tft_report_error(state, "a code of more than fifteen characters")
    status = leader.next(messages.Heartbeat).status
    assert status.npu_status == numbers.TrainState.UCE_HIGH and status.error_code == "a code of more "


def test_arguments_of_callbacks_are_not_changed_under_a_checkpoint(leader: ScriptedController) -> None:
    tft.tft_set_step_args("first")
    tft.tft_set_step_args(None)
    assert runtime.runtime.callbacks.args == "first"
    runtime.runtime.processor.steps.begin_dump()
    with pytest.raises(Exception, match="checkpoint"):
        tft.tft_set_step_args("second")
    with pytest.raises(Exception, match="checkpoint"):
        tft.tft_start_copy_os()


def test_questions(leader: ScriptedController) -> None:
    assert tft.tft_get_repair_type() == "unknow" and tft.tft_get_repair_step() == 0
    assert not tft.tft_is_reboot_node() and tft.tft_get_reboot_type() == "arf"
    tft.tft_report_error(tft.ReportState.RS_HCCL_FAILED.value)
    leader.ask(messages.DeviceStop, repair_type=2)
    assert tft.tft_get_repair_type() == "recover"


@pytest.mark.parametrize("name", [*HANDLERS, "decrypt"])
def test_handlers_must_be_callable(name: str) -> None:
    with pytest.raises(TypeError):
        getattr(tft, f"tft_register_{name}_handler")("no function")


def test_without_a_processor_reports_are_errors() -> None:
    runtime.reset()
    for call in (tft.tft_start_updating_os, tft.tft_reset_limit_step, tft.tft_wait_next_action):
        with pytest.raises(Exception, match="tft_init_processor"):
            call()
    tft.tft_destroy_processor()
    tft.tft_pause_train(3)
    tft.tft_register_decrypt_handler(None)


def test_export_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTP_STOP_CLEAN_BEFORE_DUMP", "0")
    with pytest.raises(Exception, match="MindSpeed"):
        tft.set_mindio_export_version("Megatron")
    tft.set_mindio_export_version("MindSpeed")
    assert os.environ["TTP_STOP_CLEAN_BEFORE_DUMP"] == "1"
    assert api_framework.get_mindio_export_version() == "MindSpeed"
    runtime.reset()
    faults.reset()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("tft.tft_init_processor(4, 4, False, False)", "0 <= rank < world_size"),
        ("tft.tft_init_processor(0, 4, False)", "tls_info"),
        ("tft.tft_start_processor('127.0.0.1', 8000)", "tft_init_processor first"),
        ("tft.tft_init_processor(0, 4, False, False); tft.tft_start_processor('127.0.0.1', 80)", "1024"),
        ("tft.tft_init_processor(0, 4, False, False); tft.tft_init_processor(0, 4, False, False)", "before"),
        ("tft.tft_init_processor(0, 4, False, False); tft.tft_start_processor('127.0.0.1', 8000, 1)", "local_ip"),
    ],
)
def test_a_mistake_at_the_start_ends_the_process_at_once(tmp_path: Path, code: str, says: str) -> None:
    script = f"from mindio_ttp import framework_ttp as tft; {code}; print('never')"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TTP_LOG_PATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "never" not in ended.stdout
    assert says in ended.stderr


# --- environment -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "read", "default", "good", "bad"),
    [
        ("TTP_RETRY_TIMES", environment.retry_times, 10, "300", ("0", "301", "ten", "-1", "1.5", "")),
        ("TTP_NORMAL_ACTION_TIME_LIMIT", environment.action_limit, 180, "30", ("29", "1801")),
        ("MINDIO_WAIT_MINDX_TIME", environment.platform_limit, 30, "3600", ("0", "3601")),
        ("TTP_FRAMEWORK_TYPE", environment.framework_type, 0, "1", ("2", "x")),
    ],
)
def test_numbers_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, name: str, read: Any, default: int, good: str, bad: tuple[str, ...]
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert read() == default
    monkeypatch.setenv(name, good)
    assert read() == int(good)
    for value in bad:
        monkeypatch.setenv(name, value)
        assert read() == default


# --- log -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    log.stop()
    monkeypatch.setenv("TTP_LOG_PATH", str(tmp_path / "logs"))
    yield tmp_path / "logs"
    log.stop()


def _mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


def test_a_log_for_each_process(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTP_LOG_LEVEL", "WARNING")
    log.start()
    log.logger.info("not this")
    log.logger.warning("but this")
    file = log_path / f"ttp_log.log.{os.getpid()}"
    assert _mode(file) == 0o640
    log.stop()
    assert _mode(file) == 0o440 and "but this" in file.read_text() and "not this" not in file.read_text()


def test_the_log_is_rotated(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_BYTES", 500)
    log.start()
    for _ in range(40):
        log.logger.error("x" * 100)
    files = sorted(log_path.glob("ttp_log.log.*"))
    assert len(files) == log.FILES and all(file.stat().st_size <= 500 for file in files)


def test_one_log_for_all_processes(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTP_LOG_MODE", "ONLY_ONE")
    log.start()
    log.logger.error("from here")
    other = "from evertrain.mindio.tft import log; log.start(); log.logger.error('from there')"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", other], env=variables, check=True, timeout=60)
    text = (log_path / "ttp_log.log").read_text()
    assert "from here" in text and "from there" in text


def test_the_log_to_standard_output(log_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("TTP_LOG_STDOUT", "1")
    log.start()
    log.logger.error("seen")
    assert "seen" in capsys.readouterr().out and not log_path.exists()


def test_a_shared_log_whose_directory_is_gone_harms_nobody(
    log_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("TTP_LOG_MODE", "ONLY_ONE")
    log.start()
    log.logger.error("written")
    shutil.rmtree(log_path)
    for _ in range(3):
        log.logger.error("lost")
    assert capsys.readouterr().err.count("can't be written") == 1


@pytest.mark.parametrize("obstacle", ["link", "file", "full"])
def test_a_log_that_can_t_be_written_harms_nobody(
    log_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, obstacle: str
) -> None:
    if obstacle == "link":
        (log_path.parent / "elsewhere").mkdir()
        log_path.symlink_to(log_path.parent / "elsewhere")
    elif obstacle == "file":
        log_path.write_text("")
    log.start()
    if obstacle == "full":
        handler = log._handler
        assert isinstance(handler, logging.FileHandler) and handler.stream is not None
        handler.stream.close()
        handler.stream = open("/dev/full", "w")  # noqa: SIM115
    for _ in range(3):
        log.logger.error("lost")
    assert capsys.readouterr().err.count("mindio_ttp") == 1
