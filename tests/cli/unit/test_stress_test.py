"""`evertrain stress-test`: which chips are tested, by whose right, and what is said of the result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from evertrain.cli import main as cli
from evertrain.cli import stressing
from evertrain.cli.running import CommandError
from evertrain.cli.stress_test import make_parser
from evertrain.clusterd.services.tokens import Tokens

SECRET = b"0123456789abcdef0123456789abcdef"


def order(*arguments: str) -> Any:
    given = make_parser().parse_args(["job", *arguments])
    return stressing._order("uid", given.node, given.op)


def test_all_nodes_or_those_that_are_named() -> None:
    assert list(order().message.allNodesOps) == [0] and not order().message.stressParam
    assert list(order("--op", "p2p,aic").message.allNodesOps) == [1, 0]
    named = order("--node", "a", "--node", "b", "--op", "1").message
    assert {node: list(each.ops) for node, each in named.stressParam.items()} == {"a": [1], "b": [1]}
    assert not named.allNodesOps and named.jobID == order().request.jobID == "uid"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--op", "gpu"), "'gpu' is no test"),
        (("--op", "aic,0"), "names a test twice"),
        (("--node", "a", "--node", "a"), "named twice"),
        (("--timeout", "0"), "above 0"),
        (("--tls-ca", "x"), "belong together"),
    ],
)
def test_what_makes_no_sense(arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["stress-test", "job", *arguments])
    assert ended.value.code == 2 and complaint in capsys.readouterr().err


def test_it_takes_the_secret_of_the_cluster(tmp_path: Path) -> None:
    def token(given: Path | None = None) -> str:
        return stressing._platform_token(given, tmp_path)

    assert token() == "", "ClusterD may ask for none"
    file = tmp_path / "keys" / "clusterd-secret"
    file.parent.mkdir()
    file.write_bytes(SECRET)
    assert token() == Tokens([SECRET]).platform()
    file.write_bytes(b"short")
    with pytest.raises(CommandError, match="clusterd-secret: a secret"):
        token()
    other = tmp_path / "other"
    other.write_bytes(SECRET + b"\n")
    assert token(other) == Tokens([SECRET]).platform()
    with pytest.raises(FileNotFoundError):
        token(tmp_path / "none")


def test_results_are_told_by_chip() -> None:
    tested = {"rankResult": {"0": {"code": "0", "result": "OK"}, "1": {"code": "3", "result": "exec timeout"}}}
    assert stressing.described(json.dumps({"node-0": {"4": tested}, "node-1": {}})) == [
        "node-0: device 4: test 0 OK, test 1 exec timeout"
    ]
    for nonsense in ("", "{", "[1]", '{"a": 1}', '{"a": {"b": {}}}'):
        assert stressing.described(nonsense) == [nonsense]


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["stress-test", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    lines = re.findall(r"^  evertrain stress-test (my-job.*?)(?:  .*)?$", text, re.MULTILINE)
    assert len(lines) == 3 and all(make_parser().parse_args(line.split()) for line in lines)
    assert "exit code: 0" in text
