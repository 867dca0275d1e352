"""What a user is told about a YAML file that is wrong: the file, the line and the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertrain.cli import manifest

JOB = """\
# a comment
apiVersion: mindxdl.gitee.com/v1
kind: AscendJob
metadata:
  name: job
  labels:
    framework: pytorch
    huawei.com/a.b: x
spec:
  replicaSpecs:
    Master:
      replicas: two
      template:
        spec:
          containers:
            - name: other
            - name: ascend
              image: i
"""


def line_of(field: str) -> int:
    return manifest.parse(JOB, "job.yaml")[0].line_of(field)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("spec.replicaSpecs.Master.replicas", "      replicas: two"),
        ("spec.replicaSpecs[Master].replicas", "      replicas: two"),
        ("spec.replicaSpecs.Master.template.spec.containers[1].image", "              image: i"),
        ("spec.replicaSpecs.Master.template.spec.containers[1].imag", "            - name: ascend"),
        ("metadata.labels.huawei.com/a.b", "    huawei.com/a.b: x"),
        ('metadata.labels["huawei.com/a.b"]', "    huawei.com/a.b: x"),
        ("spec.runPolicy.backoffLimit", "spec:"),
        ("", "apiVersion: mindxdl.gitee.com/v1"),
    ],
)
def test_a_field_is_found_in_its_line(field: str, text: str) -> None:
    assert JOB.splitlines()[line_of(field) - 1] == text


def test_of_keys_with_dots_the_longest_is_meant() -> None:
    text = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: p\n  labels:\n    app: a\n    app.kind: b\n"
    document = manifest.parse(text, "job.yaml")[0]
    assert (document.line_of("metadata.labels.app"), document.line_of("metadata.labels.app.kind")) == (6, 7)


def test_documents_are_found_and_empty_ones_left_out() -> None:
    documents = manifest.parse(f"---\n---\n{JOB}---\n{JOB}", "job.yaml")
    assert [document.line for document in documents] == [4, 5 + len(JOB.splitlines())]
    assert documents[0].object["metadata"]["labels"]["framework"] == "pytorch"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: b\n  c: d\n", "job.yaml, line 2: not YAML: mapping values are not allowed here"),
        ("kind: [1, 2\n", "job.yaml, line 2: not YAML: while parsing a flow sequence"),
        ("- 1\n", "job.yaml, line 1: an object is a mapping"),
        ("kind: AscendJob\nmetadata: {name: x}\n", "job.yaml, line 1: apiVersion: is missing"),
        ("apiVersion: v1\nkind: 3\nmetadata: {name: x}\n", "job.yaml, line 2: kind: is missing or not a string"),
        ("apiVersion: v1\nkind: Pod\nmetadata:\n  labels: {}\n", "job.yaml, line 3: metadata.name: is missing"),
        ("apiVersion: v1\nkind: Pod\nkind: Pod\n", "job.yaml, line 3: kind is given twice"),
        ("a: !!python/object:os.system {}\n", "job.yaml, line 1: not YAML: could not determine a constructor"),
        ("a: &a [*a]\n", "job.yaml, line 1: an alias that contains itself"),
        ("a: " + "[" * 500 + "]" * 500, "nested"),
        ("a: \0", "job.yaml, line 1: not YAML: special characters"),
    ],
)
def test_bad_files_are_refused_with_the_place(text: str, said: str) -> None:
    with pytest.raises(manifest.ManifestError) as caught:
        manifest.parse(text, "job.yaml")
    assert said in str(caught.value)


def test_aliases_that_grow_without_measure_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(manifest.ManifestError, match="more than 200000 values"):
        manifest.parse("\n".join(lines), "job.yaml")


def test_files_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    with pytest.raises(manifest.ManifestError, match="cannot be read: No such file"):
        manifest.read(str(file))
    file.write_bytes(b"a: b\nc: \xff\n")
    with pytest.raises(manifest.ManifestError, match="line 2: not a text file"):
        manifest.read(str(file))
    file.write_bytes(b"#" * (manifest.LIMIT + 1))
    with pytest.raises(manifest.ManifestError, match="larger than 3 MiB"):
        manifest.read(str(file))


@pytest.mark.parametrize(
    ("reason", "message", "field"),
    [
        ("InvalidFramework", "framework label is not set", "metadata.labels.framework"),
        ("InvalidReplicaType", "replicaType is Chief but must be one of", "spec.replicaSpecs.Chief"),
        ("InvalidReplicaType", "replicaType is not valid: there need 1 leader", "spec.replicaSpecs"),
        ("InvalidReplicaSpec", "Worker replicaSpec is not valid: replicas can", "spec.replicaSpecs.Worker.replicas"),
        ("InvalidReplicaSpec", "replicaSpec is not valid: when scheduler not found", "spec.replicaSpecs"),
        (
            "InvalidContainer",
            "Master replicaSpec is not valid: There is no container named ascend",
            "spec.replicaSpecs.Master.template.spec.containers",
        ),
    ],
)
def test_validations_point_to_a_field(reason: str, message: str, field: str) -> None:
    assert manifest.blame(reason, message) == field


def test_fields_are_found_in_the_text_of_a_refusal() -> None:
    strict = 'strict decoding error: unknown field "spec.a", unknown field "spec.replicaSpecs.Master.b"'
    assert manifest.blamed(strict) == [
        ("spec.a", 'unknown field "spec.a"'),
        ("spec.replicaSpecs.Master.b", 'unknown field "spec.replicaSpecs.Master.b"'),
    ]
    invalid = 'AscendJob "x" is invalid: spec.replicaSpecs.Master.replicas: Invalid value: "string": must be integer'
    assert manifest.blamed(invalid) == [("spec.replicaSpecs.Master.replicas", invalid)]


def test_a_refusal_of_the_server_is_translated_into_lines() -> None:
    from evertrain.cli.connection import Refused
    from evertrain.cli.run import explain

    document = manifest.parse(JOB, "job.yaml")[0]
    causes = [
        {"field": "spec.replicaSpecs.Master.replicas", "message": 'Invalid value: "string": must be integer'},
        {"field": "metadata.labels.framework", "message": "Required value"},
    ]
    error = explain(document, Refused(422, {"message": "is invalid", "details": {"causes": causes}}))
    assert str(error).splitlines() == [
        'job.yaml, line 12: spec.replicaSpecs.Master.replicas: Invalid value: "string": must be integer',
        "job.yaml, line 7: metadata.labels.framework: Required value",
    ]
    both = [{"field": "metadata.labels", "message": what} for what in ("one thing", "another", "another")]
    assert str(explain(document, Refused(422, {"details": {"causes": both}}))).splitlines() == [
        "job.yaml, line 6: metadata.labels: one thing",
        "job.yaml, line 6: metadata.labels: another",
    ]
    wrong = 'unknown field "spec.a", duplicate field "spec.replicaSpecs.Master.replicas"'
    strict = {"message": f'AscendJob in version "v1" cannot be handled: strict decoding error: {wrong}'}
    assert str(explain(document, Refused(400, strict))).splitlines() == [
        'job.yaml, line 9: spec.a: unknown field "spec.a"',
        'job.yaml, line 12: spec.replicaSpecs.Master.replicas: duplicate field "spec.replicaSpecs.Master.replicas"',
    ], "each place with what is wrong there, not with everything"
    assert str(explain(document, Refused(413, {"message": "too large"}))) == "job.yaml, line 2: too large"
