"""A whole job whose links are encrypted and whose members have to know its token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.taskd.e2e.test_chain import STEPS, assert_same_end
from tests.taskd.jobs import TwoPods

TOKEN = "nobody-else-knows-this"


@pytest.mark.matrix
def test_a_fault_is_recovered_from_behind_tls_and_no_secret_is_written_down(tmp_path: Path) -> None:
    issued = Authority(tmp_path).issue()
    pods = TwoPods(
        tmp_path / "job",
        EVERTRAIN_TOKEN=TOKEN,
        TASKD_TLS_CA=issued.ca,
        TASKD_TLS_CERT=issued.cert,
        TASKD_TLS_KEY=issued.key,
        TASKD_FILE_LOG_LEVEL="DEBUG",
    )
    result = pods.run(f"--steps={STEPS}", "--fault=6:3:kill")
    assert_same_end(result)
    key = "".join(Path(issued.key).read_text().split("\n")[1:-2])[:40]
    written = [file for file in pods.folder.rglob("*") if file.is_file()]
    assert any(file.name == "manager.log" for file in written)
    for file in written:
        content = file.read_bytes()
        assert TOKEN.encode() not in content and key.encode() not in content, file
