"""What people write to have links switched, and what it comes to, without a cluster."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

import grpc
import pytest

from evertrain.acjob import names
from evertrain.cli import main as cli
from evertrain.cli import nics, ordering
from evertrain.cli.running import UsageError
from evertrain.cli.switch_nic import make_parser
from evertrain.clusterd.services import orders
from tests.clusterd.services import a_job

NODE = "node-0"
LEAF = "[device0, device8, device2, device10, device4, device12, device6, device14]"
OF_LEAF = [0, 8, 2, 10, 4, 12, 6, 14]
KNOWN = {NODE: [str(number) for number in range(16)], "node-1": ["0", "1"]}


def meant(*arguments: str, known: dict[str, list[str]] | None = None) -> nics.Operations:
    given = make_parser().parse_args(["job", *arguments])
    return nics.operations(given.node, given.dev, given.op, KNOWN if known is None else known)


@pytest.mark.parametrize(
    ("dev", "op", "ranks", "backup"),
    [
        ("[device0, device8]", "[true, true]", [0, 8], True),
        ("[device0, device8]", "[false, false]", [0, 8], False),
        ("[device0]", "[true]", [0], True),
        ("[device0]", "[false]", [0], False),
        (LEAF, f"[{', '.join(['true'] * 8)}]", OF_LEAF, True),
        (LEAF, f"[{', '.join(['false'] * 8)}]", OF_LEAF, False),
    ],
)
def test_the_six_examples_of_the_document(dev: str, op: str, ranks: list[int], backup: bool) -> None:
    wanted = meant("--node", NODE, "--dev", dev, "--op", op)
    order = orders.switch_nics("j", a_job("j", nodes=1, chips=16), True, wanted, {NODE: 0}.get)
    assert order.ops == dict.fromkeys(sorted(ranks), backup)


def test_short_ways_to_say_it() -> None:
    everything = {NODE: (KNOWN[NODE], [True] * 16), "node-1": (["0", "1"], [True] * 2)}
    assert meant("--op", "true") == meant("--op", "backup") == everything
    assert meant("--node", "node-1", "--op", "true,false") == {"node-1": (["0", "1"], [True, False])}
    assert meant("--dev", "0,device1", "--op=false") == dict.fromkeys(KNOWN, (["0", "1"], [False, False]))
    each = ("--node", NODE, "--dev", "8", "--op", "true", "--node", "node-1", "--dev", "0,1", "--op", "false")
    assert meant(*each) == {NODE: (["8"], [True]), "node-1": (["0", "1"], [False, False])}
    assert nics.described(meant(*each)) == [
        "node-0: device 8 to the backup link",
        "node-1: device 0, 1 to the primary link",
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--node", NODE, "--node", NODE, "--op", "true"), "named twice"),
        (("--node", NODE, "--dev", "0,1,2", "--op", "true,false"), "3 devices and 2 operations"),
        (("--node", NODE, "--op", "true", "--op", "false"), "--op is given 2 times for 1 nodes"),
        (("--node", "node-7", "--op", "true"), "no device on node-7"),
    ],
)
def test_what_makes_no_sense_together(arguments: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        meant(*arguments)
    with pytest.raises(UsageError, match="no pod"):
        meant("--op", "true", known={})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "--op"),
        (("--op", "yes"), "'yes' is neither true"),
        (("--op", "true,"), "is not a list"),
        (("--op", "true", "--dev", "npu0"), "'npu0' is not a device"),
        (("--op", "true", "--dev", "0,device0"), "names a device twice"),
        (("--op", "true", "--timeout", "0"), "above 0"),
        (("--op", "true", "--tls-ca", "x"), "belong together"),
    ],
)
def test_what_makes_no_sense_at_all(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["switch-nic", "job", *arguments])
    assert ended.value.code == 2 and complaint in capsys.readouterr().err


def pod(node: str, *devices: str, key: str = "ascend.kubectl.kubernetes.io/ascend-910-configuration") -> Any:
    text = json.dumps({"devices": [{"device_id": device} for device in devices]})
    return {"metadata": {"annotations": {key: text}}, "spec": {"nodeName": node}}


def test_the_devices_of_a_job_are_in_the_annotations_of_its_pods() -> None:
    pods = [pod("a", "0", "8"), pod("b", "1"), pod("a", "2"), pod("", "3"), pod("c")]
    assert nics.used([*pods, {"metadata": {}}, pod("d", "4", key="other")]) == {"a": ["0", "8", "2"], "b": ["1"]}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (grpc.StatusCode.UNAVAILABLE, "port-forward -n mindx-dl service/clusterd-grpc-svc 8899"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "evertrain timeline"),
        (grpc.StatusCode.UNAUTHENTICATED, "ClusterD refused: why"),
    ],
)
def test_what_is_said_when_clusterd_is_not_to_be_had(code: grpc.StatusCode, words: str) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="why")
    assert words in ordering.reason(error, "there:1")


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["switch-nic", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for line in re.findall(r"^  (evertrain switch-nic my-job .*?)(?:  .*)?$", text, re.MULTILINE):
        arguments = argparse.Namespace(**vars(make_parser().parse_args(line.split()[2:])))
        assert nics.operations(arguments.node, arguments.dev, arguments.op, KNOWN)
    assert "exit code: 0" in text


@pytest.mark.parametrize(
    ("annotations", "address"),
    [(None, "10.0.0.9:8899"), ({names.CLUSTERD_ADDRESS: "127.0.0.1:12345"}, "127.0.0.1:12345")],
)
async def test_where_clusterd_is_asked(annotations: dict[str, str] | None, address: str) -> None:
    """The address of a Service may be nobody's outside of the pods' network, or a stranger's."""

    class Kube:
        async def get(self, *_: object) -> Any:
            metadata = {"annotations": annotations} if annotations else {}
            return {"metadata": metadata, "spec": {"clusterIP": "10.0.0.9", "ports": [{"port": 8899}]}}

    assert await ordering._address(Kube()) == address  # type: ignore[arg-type]
