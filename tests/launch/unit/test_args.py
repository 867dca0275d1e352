"""The command line: torchrun's flags with their meaning, what is refused, and what `--help` teaches."""

import pytest

from evertrain.launch import args
from evertrain.launch.options import OPTIONS

TORCHRUN_FLAGS = [
    "--nnodes",
    "--nproc-per-node",
    "--nproc_per_node",
    "--rdzv-backend",
    "--rdzv_backend",
    "--rdzv-endpoint",
    "--rdzv_endpoint",
    "--rdzv-id",
    "--rdzv_id",
    "--rdzv-conf",
    "--rdzv_conf",
    "--standalone",
    "--max-restarts",
    "--max_restarts",
    "--monitor-interval",
    "--monitor_interval",
    "--start-method",
    "--start_method",
    "--event-log-handler",
    "--event_log_handler",
    "--role",
    "-m",
    "--module",
    "--no-python",
    "--no_python",
    "--run-path",
    "--run_path",
    "--log-dir",
    "--log_dir",
    "-r",
    "--redirects",
    "-t",
    "--tee",
    "--log-line-prefix-template",
    "--log_line_prefix_template",
    "--local-ranks-filter",
    "--local_ranks_filter",
    "--duplicate-stdout-filters",
    "--duplicate_stdout_filters",
    "--duplicate-stderr-filters",
    "--duplicate_stderr_filters",
    "--node-rank",
    "--node_rank",
    "--master-addr",
    "--master_addr",
    "--master-port",
    "--master_port",
    "--local-addr",
    "--local_addr",
    "--logs-specs",
    "--logs_specs",
    "--print-completion",
    "--print_completion",
    "--numa-binding",
    "--numa_binding",
    "--signals-to-handle",
    "--signals_to_handle",
    "--shutdown-timeout",
    "--shutdown_timeout",
    "--virtual-local-rank",
    "--virtual_local_rank",
]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("pass")
    return str(path)


def parse(*argv, env=None):
    return args.parse([str(item) for item in argv], env or {})


def refused(capsys, *argv, env=None):
    with pytest.raises(SystemExit) as ended:
        parse(*argv, env=env)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_every_flag_of_torchrun_exists():
    known = {spelling for option in OPTIONS for spelling in option.spellings()}
    assert set(TORCHRUN_FLAGS) <= known


def test_flags_of_the_installed_torchrun_exist():
    run = pytest.importorskip("torch.distributed.run")
    theirs = {flag for action in run.get_args_parser()._actions for flag in action.option_strings}
    known = {spelling for option in OPTIONS for spelling in option.spellings()}
    assert theirs - {"-h", "--help"} <= known


def test_a_torchrun_command_line(script):
    config = parse(
        "--standalone", "--nnodes=1", "--nproc_per_node=4", "--rdzv-backend", "c10d", "--start-method", "fork",
        "--master_addr", "localhost", "--master_port", "12345", script, "--nproc_per_node", "9", "--lr=1",
    )  # fmt: skip
    assert config.world_size == 4
    assert (config.master_addr, config.master_port) == ("localhost", 12345)
    assert config.script_args == ("--nproc_per_node", "9", "--lr=1"), "what follows the script belongs to it"


def test_defaults(script):
    config = parse(script)
    assert config.world_size == 1
    assert config.max_restarts == 3
    assert config.master_port == 0, "a free port is chosen at start"
    assert config.warm == 1
    assert config.timing.bound == 2.0
    assert config.run_id != parse(script).run_id


def test_pet_variables_are_read_as_torchrun_does(script):
    env = {
        "PET_NPROC_PER_NODE": "3",
        "PET_MAX_RESTARTS": "7",
        "PET_MODULE": "0",
        "PET_RDZV_ID": "job9",
        "PET_ROLE": "r",
    }
    config = parse(script, env=env)
    assert (config.world_size, config.max_restarts, config.module, config.run_id) == (3, 7, False, "job9")
    assert config.role == "r"
    assert parse("--nproc-per-node=2", script, env=env).world_size == 2, "a flag wins"


def test_switch_by_variable(script):
    assert parse("json.tool", env={"PET_MODULE": "1"}).module
    assert parse(script, env={"EVERTRAIN_PARK": "yes"}).park


OPEN = ("--nnodes=2", "--nproc-per-node=3", "--node-rank=1", "--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:29500")
NODES = (*OPEN, "--ft-insecure")
TOKEN = {"EVERTRAIN_TOKEN": "0123456789abcdef"}


def test_several_nodes(script):
    config = parse(*NODES, script, env=TOKEN)
    assert (config.world_size, config.local_size, list(config.ranks)) == (6, 3, [3, 4, 5])
    assert (config.master_addr, config.master_port) == ("10.0.0.1", 29500)
    assert config.token == TOKEN["EVERTRAIN_TOKEN"]


def test_the_beginning_of_an_option_will_do(script):
    assert parse("--nproc", "2", script).world_size == 2


@pytest.mark.parametrize(
    "argv, words",
    [(("--ft-bond=1",), "did you mean --ft-bound?"), (("--nprc-per-node", "2"), "did you mean --nproc-per-node?")],
)
def test_a_mistyped_option(script, capsys, argv, words):
    assert words in refused(capsys, *argv, script)


def test_options_behind_the_script(script):
    assert args.misplaced(["--lr", "1", "--ft-bound=2", "--nproc_per_node", "4"]) == ["--ft-bound", "--nproc_per_node"]
    assert args.misplaced(["--lr", "1", "x"]) == []


def test_the_token_file_must_be_private(script, tmp_path, capsys):
    path = tmp_path / "token"
    path.write_text("f" * 32 + "\n")
    path.chmod(0o644)
    assert "chmod 600" in refused(capsys, *NODES, "--ft-token-file", str(path), script)
    path.chmod(0o600)
    assert parse(*NODES, "--ft-token-file", str(path), script).token == "f" * 32


@pytest.mark.parametrize(
    "argv, words",
    [
        (NODES, "needs a secret that all of them share"),
        (OPEN, "give --ft-tls-cert, --ft-tls-key and --ft-tls-ca, or --ft-insecure"),
        (("--nnodes=2", "--master-port=1"), "say which of the nodes this is"),
        (("--nnodes=2", "--node-rank=2", "--master-port=1"), "0 to 1"),
        (("--nnodes=2", "--node-rank=0"), "needs --master-addr and --master-port"),
        (("--nnodes=2", "--node-rank=0", "--standalone", "--master-port=1"), "--standalone means one node"),
        (("--node-rank=1",), "there is one node"),
    ],
)
def test_what_several_nodes_need_is_said(script, capsys, argv, words):
    assert words in refused(capsys, *argv, script)


def test_number_of_nodes(script, capsys):
    assert "MIN:MAX" in refused(capsys, "--nnodes", "many", script)
    assert parse("--nnodes", "1:1", script).world_size == 1


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--logs-specs", "x"], "--logs-specs is not supported"),
        (["--numa-binding", "node"], "--numa-binding is not supported"),
        (["--print-completion", "bash"], "--print-completion is not supported"),
        (["--event-log-handler", "console"], "--ft-events"),
        (["--node-rank", "1"], "its rank is 0"),
        (["--max-restarts", "-1"], "--max-restarts: must not be negative"),
        (["--max-restarts", "x"], "--max-restarts: 'x' is not a valid N"),
        (["--nproc-per-node", "many"], "expected a number, cpu, gpu, xpu or auto"),
        (["--nproc-per-node", "0"], "at least 1"),
        (["--start-method", "magic"], "invalid choice: 'magic'"),
        (["--redirects", "7"], "expected 0, 1, 2, 3 or pairs"),
        (["--local-ranks-filter", "a"], "expected ranks such as"),
        (["--signals-to-handle", "SIGKILL"], "not a signal that can be handled"),
        (["--master-port", "70000"], "not a port number"),
        (["--ft-bound", "0"], "--ft-bound: must be a positive number"),
        (["--ft-timing", "nonsense=1"], "there is no timeout called 'nonsense'"),
        (["--ft-timing", "stop"], "expected NAME=SECONDS"),
        (["--ft-timing", "data_stall=0.1"], "bound (2 s) must not exceed data_stall"),
        (["--ft-fault", "boom@step=1,rank=0"], "unknown fault kind 'boom'"),
        (["--ft-fault", "kill@step=1,rank=5"], "below 1"),
        (["--ft-events", "/dev/null/x.jsonl"], "can't be written"),
        (["--ft-checkpoint-dir", "/dev/null"], "--ft-checkpoint-dir: /dev/null can't be written to: Not a directory"),
        (["--ft-checkpoint-dir", "/dev/null/a/b"], "/dev/null/a/b: /dev/null can't be written to: Not a directory"),
        (["--ft-checkpoint-dir", "/proc/a/b"], "/proc/a/b: /proc can't be written to: No such file"),
    ],
)
def test_what_is_refused_and_why(script, capsys, argv, words):
    assert words in refused(capsys, *argv, script)


def test_a_checkpoint_directory_is_checked_and_not_created(script, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    assert parse("--ft-checkpoint-dir", here, script).checkpoint_dir == str(here)
    assert not list(here.iterdir())
    missing = here / "a" / "b"
    assert parse("--ft-checkpoint-dir", missing, script).checkpoint_dir == str(missing)
    assert not list(here.iterdir())


def test_a_script_that_does_not_exist(tmp_path, capsys):
    assert "does not exist" in refused(capsys, tmp_path / "missing.py")
    assert "no module called 'nosuchmodule.sub'" in refused(capsys, "-m", "nosuchmodule.sub")
    assert "was not found" in refused(capsys, "--no-python", "no-such-program")
    assert "the script to run is missing" in refused(capsys, "--nproc-per-node", "2")


def test_module_and_no_python_exclude_each_other(capsys):
    assert "exclude each other" in refused(capsys, "-m", "--no-python", "json.tool")


def test_streams_by_rank(script):
    config = parse("--nproc-per-node=3", "-r", "0:1,2:3", "-t", "2", "--local-ranks-filter=0,2", script)
    assert config.redirects == {0: 1, 1: 0, 2: 3}
    assert config.tee == {0: 2, 1: 2, 2: 2}
    assert config.shown_ranks == {0, 2}


def test_repeated_flags_add_up(script):
    config = parse(
        "--nproc-per-node=2", "--ft-fault", "kill@step=1,rank=0", "--ft-fault=stop@step=2,rank=1",
        "--ft-timing", "stop=9", "--ft-timing=grace=4", "--ft-warm-import", "numpy", "--ft-warm-import", "json,csv",
        script,
    )  # fmt: skip
    assert [fault.kind for fault in config.faults] == ["kill", "stop"]
    assert (config.timing.stop, config.timing.grace) == (9, 4)
    assert config.warm_imports == ("numpy", "json", "csv")


def test_shutdown_timeout_is_the_grace_period(script):
    assert parse("--shutdown-timeout", "7", script).timing.grace == 7
    assert parse("--shutdown-timeout", "7", "--ft-grace", "5", script).timing.grace == 5


def test_endpoint_means_the_master_only_with_the_static_backend(script):
    static = parse("--rdzv-endpoint=node0:1234", script)
    assert (static.master_addr, static.master_port) == ("node0", 1234)
    c10d = parse("--rdzv-backend=c10d", "--rdzv-endpoint=node0:1234", script)
    assert (c10d.master_addr, c10d.master_port) == ("127.0.0.1", 0)


def test_no_spare_for_a_program_that_is_not_python():
    assert parse("--no-python", "true").warm == 0


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "size of the job",
        "fault injection",
        "examples:",
        "exit codes:",
        "resumes from the newest checkpoint",
    ):
        assert words in text
