"""Safe reads, addresses, and checks of values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from evertrain.taskd import files, ip
from evertrain.taskd.validators import (
    ClassValidator,
    DirectoryValidator,
    FileValidator,
    IntValidator,
    MapValidator,
    RankSizeValidator,
    StringValidator,
    Validator,
)

# --- files


def test_a_regular_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 10)
    assert files.read_bytes(file, 10) == b"x" * 10
    with pytest.raises(files.UnsafeFile, match="larger than 9 bytes"):
        files.read_bytes(file, 9)
    with pytest.raises(files.UnsafeFile, match="larger than 9 bytes"):
        files.read_bytes("/proc/self/status", 9)  # which says that it has no bytes
    assert files.text_or_empty(file, 9) == "" and files.text_or_empty(file) == "x" * 10


def test_no_link_no_pipe_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nowhere").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    reasons = {"link": "symbolic link", "nowhere": "symbolic link", "pipe": "regular", "folder": "regular"}
    for name, reason in reasons.items():
        for whole_path in (False, True):
            with pytest.raises(OSError, match=reason):
                files.read_text(tmp_path / name, whole_path=whole_path)
        assert files.text_or_empty(tmp_path / name) == ""
    with pytest.raises(FileNotFoundError):
        files.read_text(tmp_path / "missing", whole_path=True)


def test_no_link_on_the_way_where_that_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("text")
    (tmp_path / "link").symlink_to("folder")
    monkeypatch.chdir(tmp_path)
    assert files.read_text("folder/file", whole_path=True) == "text"
    assert files.read_text("link/file") == "text"
    for path in ("link/file", "folder/../folder/file", tmp_path / "link" / "file"):
        with pytest.raises(files.UnsafeFile):
            files.read_text(path, whole_path=True)


def put_volume(folder: Path, moment: str, content: str) -> None:
    """As the kubelet does it."""
    (folder / moment).mkdir(parents=True, exist_ok=True)
    (folder / moment / "reset.json").write_text(content)
    (folder / "next").symlink_to(moment)
    (folder / "next").rename(folder / "..data")


@pytest.mark.parametrize("whole_path", [False, True])
def test_a_file_of_a_configmap_is_read_as_it_is_at_the_moment(tmp_path: Path, whole_path: bool) -> None:
    file = tmp_path / "volume" / "reset.json"
    put_volume(file.parent, "..2026_01", "first")
    file.symlink_to("..data/reset.json")
    assert files.read_text(file, whole_path=whole_path) == "first"
    put_volume(file.parent, "..2026_02", "second")
    assert files.read_text(file, whole_path=whole_path) == "second"


@pytest.mark.parametrize(
    ("to", "moment"),
    [("..data/reset.json", "elsewhere"), ("..data/reset.json", ".."), ("..data/reset.json", "../x"),
     ("..data/other", "..m"), ("/etc/hostname", "..m")],
)  # fmt: skip
def test_other_links_are_none_of_a_configmap(tmp_path: Path, to: str, moment: str) -> None:
    (tmp_path / "..m").mkdir()
    for name in ("..m/reset.json", "..m/other", "reset"):
        (tmp_path / name).write_text("x")
    (tmp_path / "..data").symlink_to(moment)
    (tmp_path / "reset.json").symlink_to(to)
    with pytest.raises(files.UnsafeFile):
        files.read_text(tmp_path / "reset.json")


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\xff\xfe")
    with pytest.raises(files.UnsafeFile, match="not text"):
        files.read_text(tmp_path / "file")


# --- addresses


@pytest.mark.parametrize(
    ("address", "handled"),
    [("10.0.0.1", "10.0.0.1"), ("::1", "[::1]"), ("[fe80::1]", "[fe80::1]"), ("0.0.0.0", "0.0.0.0")],
)
def test_an_address_before_a_port(address: str, handled: str) -> None:
    assert ip.pre_handle_ip(address) == handled


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "address is empty"),
        ("localhost", "invalid IP address: localhost"),
        ("1.2.3", "invalid IP address: 1.2.3"),
        ("[1.2.3.4]", "invalid IP address"),
        ("[::1", "invalid IP address"),
        ("10.0.0.1:9601", "invalid IP address"),
    ],
)
def test_what_is_no_address(address: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("[", r"\[")):
        ip.pre_handle_ip(address)


@pytest.mark.parametrize("host", ["10.0.0.1", "[::1]", "clusterd-grpc-svc.mindx-dl.svc", "abc", "127.0.0.3"])
def test_hosts_that_can_be_called(host: str) -> None:
    assert ip.is_valid_host(host), ip.host_problem(host)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("", "empty"),
        ("0.0.0.0", "every address"),
        ("[::]", "every address"),
        ("224.0.0.1", "multicast"),
        ("::1", "brackets"),
        ("[10.0.0.1]", "brackets"),
        ("-host", "neither"),
        ("ab", "neither"),
        ("a_b", "neither"),
        ("1.2.3.400", "neither"),
        ("host\n", "neither"),
    ],
)
def test_hosts_that_can_not(host: str, reason: str) -> None:
    assert reason in ip.host_problem(host) and not ip.is_valid_host(host)


# --- values


def test_a_chain_stops_at_the_first_checker_that_is_not_content() -> None:
    asked = []
    validator = (
        Validator(3)
        .register_checker(lambda value: asked.append(1) is None)
        .register_checker(lambda value: value > 5, "is too small")
        .register_checker(lambda value: asked.append(2) is None)
    )
    assert not validator.is_valid() and validator.problem == "is too small" and asked == [1]
    assert validator.check() is validator and validator.get_value("default") == "default"
    assert Validator(3).get_value() == 3 and Validator(3).is_valid()


def test_a_checker_that_raises_is_not_content() -> None:
    validator = Validator(3).register_checker(len, "has no length")
    assert not validator.is_valid() and "has no length (object of type 'int'" in validator.problem


@pytest.mark.parametrize(
    ("validator", "valid"),
    [
        (ClassValidator(3, int).check_isinstance(), True),
        (ClassValidator("3", (int, float)).check_isinstance(), False),
        (StringValidator("abc", 3, 3).check_string_length(), True),
        (StringValidator("abc", 2).check_string_length(), False),
        (StringValidator("", min_len=1).check_string_length(), False),
        (StringValidator(3), False),
        (StringValidator("a/b").check_not_contain_black_element("/"), False),
        (StringValidator("4095").can_be_transformed2int(), True),
        (StringValidator("4096").can_be_transformed2int(), False),
        (StringValidator("-1").can_be_transformed2int(), False),
        (StringValidator("-1").can_be_transformed2int(-1, 1), True),
        (StringValidator("1_0").can_be_transformed2int(), False),
        (StringValidator("²").can_be_transformed2int(), False),
        (StringValidator("x").can_be_transformed2int(), False),
        (IntValidator(3, 3, 3).check_value(), True),
        (IntValidator(3, 4).check_value(), False),
        (IntValidator(3, max_value=2).check_value(), False),
        (IntValidator(True), False),
        (IntValidator("3").check_value(), False),
        (MapValidator({"a": 1, "b": 2}, ["a"]), True),
        (MapValidator({"a": 1}, ["a", "b"]), False),
        (MapValidator(["a"], ["a"]), False),
        (RankSizeValidator(4095).check_rank_size_valid(), True),
        (RankSizeValidator(4096).check_rank_size_valid(), False),
        (RankSizeValidator(4096).check_device_num_valid(), True),
        (RankSizeValidator(0).check_device_num_valid(), False),
        (DirectoryValidator("/etc/ssl").with_blacklist(), False),
        (DirectoryValidator("/etc/ssl").with_blacklist(exact_compare=True), True),
        (DirectoryValidator("/etcetera").with_blacklist(), True),
        (DirectoryValidator("/data/PrivateKeys").should_not_contains_sensitive_words(), False),
        (DirectoryValidator("/data/../etc"), False),
        (DirectoryValidator("/data/..a"), True),
        (DirectoryValidator("").check_is_not_none(), False),
    ],
)
def test_values(validator: Validator, valid: bool) -> None:
    assert validator.is_valid() == valid, validator.problem


def test_directories_and_files(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("text")
    file.chmod(0o640)
    tmp_path.chmod(0o750)
    link.symlink_to("file")

    def whole_file(path: Path) -> Any:
        validator = FileValidator(str(path)).check_not_soft_link().check_file_regular()
        return validator.check_file_size().should_be_owned_by()

    assert whole_file(file).is_valid()
    assert "soft link" in whole_file(link).check().problem
    assert not whole_file(tmp_path).is_valid() and not whole_file(tmp_path / "missing").is_valid()
    assert not FileValidator(str(file)).check_file_size(3).is_valid()
    assert not FileValidator(str(file)).should_be_owned_by(uid=os.geteuid() + 1).is_valid()
    directory = DirectoryValidator(str(tmp_path)).path_should_exist().path_should_be_directory().check_not_soft_link()
    assert directory.should_have_mode(0o750).check_dir_file_number(2).is_valid(), directory.problem
    assert directory.check_dir_file_number(1).check().problem == "has more than 1 files"
    assert not DirectoryValidator(str(tmp_path)).should_have_mode(0o700).is_valid()
    (tmp_path / "harmless").symlink_to("/etc")
    assert not DirectoryValidator(str(tmp_path / "harmless")).with_blacklist().is_valid()
    assert DirectoryValidator(str(tmp_path)).with_blacklist().is_valid()
