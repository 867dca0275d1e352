"""Where a value comes from: flag over variable over file over default, and `--print-config` says which."""

import pytest

from evertrain.launch import args


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("pass")
    return str(path)


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "site.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_precedence(script, file):
    path = file("bound: 4\nwarm: 2\nmax_restarts: 8\nnproc-per-node: 2\n")
    env = {"EVERTRAIN_BOUND": "3", "EVERTRAIN_WARM": "3", "EVERTRAIN_CONFIG": path}
    config = args.parse(["--ft-bound", "1.5", script], env)
    assert config.timing.bound == 1.5
    assert config.warm == 3
    assert config.max_restarts == 8
    assert config.world_size == 2
    assert config.sources["bound"] == "--ft-bound"
    assert config.sources["warm"] == "EVERTRAIN_WARM"
    assert config.sources["max_restarts"] == f"{path}: max_restarts"
    assert config.sources["role"] == "default"


def test_every_kind_of_value_in_the_file(script, file):
    path = file(
        "timing: {data-stall: 40, stop: 5}\nfault: ['kill@step=1,rank=0', 'uce@step=2,rank=0']\n"
        "park: true\nwarm_import: [json]\nredirects: 3\ncheckpoint_dir: ckpt\nrdzv_id: 12\n"
    )
    config = args.parse(["--ft-config", path, script], {})
    assert (config.timing.data_stall, config.timing.stop) == (40.0, 5.0)
    assert [fault.kind for fault in config.faults] == ["kill", "uce"]
    assert config.park and config.warm_imports == ("json",)
    assert config.redirects == {0: 3}
    assert config.checkpoint_dir.endswith("/ckpt")
    assert config.run_id == "12"


@pytest.mark.parametrize(
    "text, words",
    [
        ("bounds: 1\n", "unknown key 'bounds'"),
        ("config: other.yaml\n", "unknown key 'config'"),
        ("- 1\n", "must be a mapping"),
        ("a: [\n", "is not valid YAML"),
        ("bound: soon\n", "bound: 'soon' is not a valid SECONDS"),
        ("bound: [1]\n", "is not what is expected here"),
        ("warm: -1\n", "must not be negative"),
        ("park: maybe\n", "expected 1 or 0"),
        ("timing: {stop: never}\n", "'never' is not a valid SECONDS"),
    ],
)
def test_a_bad_file_is_explained(script, file, capsys, text, words):
    path = file(text)
    with pytest.raises(SystemExit) as ended:
        args.parse(["--ft-config", path, script], {})
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert words in message and path in message


def test_a_missing_file(script, capsys):
    with pytest.raises(SystemExit):
        args.parse(["--ft-config", "/nowhere/site.yaml", script], {})
    assert "cannot read /nowhere/site.yaml: No such file" in capsys.readouterr().err


def test_an_empty_file_and_empty_variables_change_nothing(script, file):
    config = args.parse([script], {"EVERTRAIN_CONFIG": file(""), "EVERTRAIN_BOUND": ""})
    assert config.sources["bound"] == "default"


def test_timing_by_variable_in_both_notations(script):
    for text in ("stop=9,grace=8", '{"stop": 9, "grace": 8}'):
        config = args.parse([script], {"EVERTRAIN_TIMING": text})
        assert (config.timing.stop, config.timing.grace) == (9, 8)


def test_print_config_needs_no_script_and_shows_every_derived_timeout():
    config = args.parse(["--ft-bound", "1", "--ft-timing", "stop=7", "--print-config"], {"PET_ROLE": "trainer"})
    assert config.print_config
    lines = {line.split()[0]: line for line in config.describe().splitlines() if line.strip()}
    assert "1 s" in lines["timing.bound"] and "--ft-bound" in lines["timing.bound"]
    assert "5 s" in lines["timing.data_stall"] and "derived from bound" in lines["timing.data_stall"]
    assert "7 s" in lines["timing.stop"] and "--ft-timing" in lines["timing.stop"]
    assert "30 s" in lines["timing.grace"] and lines["timing.grace"].endswith("default")
    assert lines["role"].endswith("PET_ROLE")
