"""Credentials of an installation: who makes them, who shows them, and that they fit each other."""

from __future__ import annotations

import base64
import contextlib
import ssl
from pathlib import Path
from typing import Any

import pytest

from evertrain import aio
from evertrain.acjob import names
from evertrain.cli import credentials
from evertrain.clusterd.services.certificates import Certificates
from evertrain.clusterd.services.tokens import Tokens
from evertrain.kube.port import EVENT, POD, SECRET, NotFound
from evertrain.operator import __main__ as command
from evertrain.operator.shell import Operator
from tests.kube.fake import FakeKube
from tests.operator.acjobs import ascend_job
from tests.operator.bench import Bench
from tests.requests_asked import Recording

NAMESPACE = names.CLUSTERD_NAMESPACE


def make(kube: FakeKube, **options: bool) -> list[str]:
    return aio.run(credentials.make(Recording(kube, "credentials"), NAMESPACE, **options))


def content(kube: FakeKube, name: str) -> dict[str, bytes]:
    data = kube.find(SECRET, name, NAMESPACE)["data"]
    return {key: base64.b64decode(value) for key, value in data.items()}


def mounted(kube: FakeKube, name: str, folder: Path) -> Certificates:
    folder.mkdir()
    for key, value in content(kube, name).items():
        (folder / key).write_bytes(value)
    return Certificates(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")


def test_all_are_made_and_stay() -> None:
    kube = FakeKube()
    assert make(kube) == [
        "evertrain-tokens is made", "evertrain-ca is made", "clusterd-tls is made", "evertrain-job-tls is made",
    ]  # fmt: skip
    Tokens.read(content(kube, credentials.TOKENS)[credentials.SECRET_KEY])
    before = {item["metadata"]["name"]: item for item in kube.items(SECRET)}
    assert {line.partition(" ")[2] for line in make(kube)} == {"is there"}
    assert before == {item["metadata"]["name"]: item for item in kube.items(SECRET)}


def test_after_a_kill_it_makes_what_is_missing() -> None:
    kube = FakeKube()
    make(kube)
    before = content(kube, credentials.AUTHORITY)
    kube.remove(SECRET, credentials.JOBS, NAMESPACE)
    assert make(kube)[-1] == "evertrain-job-tls is made"
    assert content(kube, credentials.JOBS)["ca.crt"] == before["tls.crt"]


def test_renewed_certificates_are_of_the_same_authority_and_tokens_stay() -> None:
    kube = FakeKube()
    make(kube)
    before = {name: content(kube, name) for name in (credentials.TOKENS, credentials.AUTHORITY, credentials.SERVER)}
    assert make(kube, renew=True)[-2:] == ["clusterd-tls is renewed", "evertrain-job-tls is renewed"]
    for name in (credentials.TOKENS, credentials.AUTHORITY):
        assert content(kube, name) == before[name]
    after = content(kube, credentials.SERVER)
    assert after["tls.crt"] != before[credentials.SERVER]["tls.crt"]
    assert after["ca.crt"] == before[credentials.SERVER]["ca.crt"]


def test_a_new_authority_signs_all_anew() -> None:
    kube = FakeKube()
    make(kube)
    kube.remove(SECRET, credentials.AUTHORITY, NAMESPACE)
    assert make(kube)[1:] == ["evertrain-ca is made", "clusterd-tls is renewed", "evertrain-job-tls is renewed"]


def test_where_others_make_the_certificates() -> None:
    kube = FakeKube()
    assert make(kube, tokens_only=True) == ["evertrain-tokens is made"]


def shaken(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """A handshake, without a network. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    for end in ends:
        end.do_handshake()


def test_jobs_and_clusterd_accept_each_other(tmp_path: Path) -> None:
    kube = FakeKube()
    make(kube)
    ours = {name: mounted(kube, name, tmp_path / name) for name in (credentials.SERVER, credentials.JOBS)}
    for files in ours.values():
        files.check()
    contexts = {}
    for name, files in ours.items():
        for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = contexts[name, side] = ssl.SSLContext(side)
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(files.authority)
            context.load_cert_chain(files.certificate, files.key)
    job = contexts[credentials.JOBS, ssl.PROTOCOL_TLS_CLIENT]
    shaken(contexts[credentials.SERVER, ssl.PROTOCOL_TLS_SERVER], job, names.CLUSTERD_DOMAIN)
    with pytest.raises(ssl.SSLError, match="(?i)hostname mismatch"):
        shaken(contexts[credentials.JOBS, ssl.PROTOCOL_TLS_SERVER], job, names.CLUSTERD_DOMAIN)
    with pytest.raises(ssl.SSLError, match="unsuitable certificate purpose"):
        client = contexts[credentials.SERVER, ssl.PROTOCOL_TLS_CLIENT]
        shaken(contexts[credentials.SERVER, ssl.PROTOCOL_TLS_SERVER], client, names.CLUSTERD_DOMAIN)


# What the operator does with them.


def with_certificates(bench: Bench, certificates: dict[str, str], token: str = "t") -> Bench:
    bench.operator = Operator(
        bench.kube, clock=lambda: bench.now, rank_tables=bench.rank_tables,
        token_of=lambda uid: token, job_tls=lambda: certificates,
    )  # fmt: skip
    return bench


def ascend(pod: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in pod["spec"]["containers"] if each["name"] == "ascend")
    return found


FILES = {"ca.crt": "authority", "tls.crt": "certificate", "tls.key": "key"}


def test_pods_get_the_certificates_where_taskd_looks_for_them() -> None:
    async def test() -> None:
        bench = with_certificates(Bench(), FILES)
        await bench.running()
        (secret,) = bench.kube.items(SECRET)
        assert secret["stringData"] == {"token": "t", **FILES}
        assert len(bench.pods()) == 2
        for pod in bench.pods().values():
            (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == names.TLS_VOLUME)
            assert volume["secret"]["secretName"] == secret["metadata"]["name"]
            assert {item["key"] for item in volume["secret"]["items"]} == FILES.keys(), "the token is no file"
            container = ascend(pod)
            (mount,) = (each for each in container["volumeMounts"] if each["name"] == names.TLS_VOLUME)
            variables = {each["name"]: each.get("value") for each in container["env"]}
            for name, file in names.TLS_VARIABLES.items():
                assert variables[name] == f"{mount['mountPath']}/{file}"

    aio.run(test())


def test_certificates_that_the_user_names_stay() -> None:
    async def test() -> None:
        bench = with_certificates(Bench(), FILES)
        item = ascend_job()
        for spec in item["spec"]["replicaSpecs"].values():
            spec["template"]["spec"]["containers"][0]["env"] = [{"name": "TASKD_TLS_CA", "value": "/x"}]
        await bench.submit(item)
        await bench.settle()
        bench.admit()
        await bench.settle()
        for pod in bench.pods().values():
            variables = [each for each in ascend(pod)["env"] if each["name"] in names.TLS_VARIABLES]
            assert variables == [{"name": "TASKD_TLS_CA", "value": "/x"}]
            assert names.TLS_VOLUME not in str(pod)

    aio.run(test())


def test_the_operator_never_reads_a_secret() -> None:
    async def test() -> None:
        bench = with_certificates(Bench(), FILES)
        asked: list[str] = []
        bench.kube.before = lambda verb, kind, name: asked.append(verb) if kind == SECRET else None
        await bench.running()
        bench.kube.remove(POD, "test-job-worker-0")
        await bench.settle()
        assert "test-job-worker-0" in bench.pods()
        assert asked == ["create", "create"], "the second finds that it is there"
        assert ("Warning", "FailedCreateSecret") not in bench.events()
        assert bench.kube.items(EVENT)

    aio.run(test())


def test_renewed_certificates_are_read_again(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    read = command.certificates(tmp_path)
    assert read() == FILES
    (tmp_path / "tls.crt").write_text("newer")
    assert read()["tls.crt"] == "newer"
    assert command.certificates(None)() == {}


def test_certificates_that_are_missing_are_told(tmp_path: Path) -> None:
    with pytest.raises(command.CannotStart, match=r"--job-tls-dir: .*ca\.crt"):
        command.certificates(tmp_path)


def test_the_namespace_that_is_missing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Nowhere(FakeKube):
        async def create(self, kind: Any, item: Any) -> Any:
            raise NotFound(404, "NotFound", 'namespaces "mindx-dl" not found')

    with pytest.raises(NotFound, match="mindx-dl"):
        make(Nowhere())
    assert credentials.main(["--kubeconfig", str(tmp_path / "none")]) == 1
    assert "is not a usable kubeconfig" in capsys.readouterr().err
