"""The definition of the kind AscendJob, as a Kubernetes API server takes it. Pure.

A superset of the original's: `status.restarts` is ours. Everything that the operator defaults or refuses is left to it;
the schema says what has which type, so that a mistake gets the original's message. Only where the original would wait
for ever or guess, at a policy that doesn't exist, the schema refuses.
"""

from __future__ import annotations

from evertrain.acjob import names
from evertrain.acjob.pod_schema import QUANTITY, pod_template
from evertrain.kube.port import Object

PLURAL, SINGULAR = "ascendjobs", "ascendjob"


def definition() -> Object:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": ["acjob"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": "State", "type": "string", "jsonPath": ".status.conditions[-1:].type"},
                        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
                    ],
                    "schema": {"openAPIV3Schema": _schema()},
                }
            ],
        },
    }


def _schema() -> Object:
    return {
        "type": "object",
        "description": "A distributed training or inference job: pods that start together and find each other.",
        "properties": {
            "apiVersion": {"type": "string", "description": "The versioned schema of this object."},
            "kind": {"type": "string", "description": "AscendJob."},
            "metadata": {"type": "object"},
            "spec": _spec(),
            "status": _status(),
        },
    }


def _text(description: str) -> Object:
    return {"type": "string", "description": description}


def _choice(description: str, *choices: str) -> Object:
    """An empty text is as good as none."""
    return {"type": "string", "description": description, "enum": [*choices, ""]}


def _number(description: str, width: str = "int32") -> Object:
    return {"type": "integer", "format": width, "description": description}


def _time(description: str) -> Object:
    return {"type": "string", "format": "date-time", "description": description}


def _object(description: str, properties: Object, required: tuple[str, ...] = ()) -> Object:
    schema: Object = {"type": "object", "description": description, "properties": properties}
    if required:
        schema["required"] = list(required)
    return schema


def _map(description: str, values: Object) -> Object:
    return {"type": "object", "description": description, "additionalProperties": values}


def _spec() -> Object:
    replica = _object(
        "The pods of one type.",
        {
            "replicas": _number("How many pods; 1 if not set. The leader has exactly one."),
            "restartPolicy": _choice(
                "What happens to a pod whose container ends: Always, OnFailure, Never (the default) or ExitCode, which "
                "starts it again if it ended with 128 or more.",
                *("Always", "OnFailure", "Never", "ExitCode"),
            ),
            "template": {
                **pod_template(),
                "description": "The pod. Its container that trains must have the name `ascend`.",
            },
        },
    )
    scheduling = _object(
        "How the pods are scheduled together.",
        {
            "minAvailable": _number("How many pods must be schedulable before any starts; all if not set."),
            "queue": _text("The queue of the scheduler; `default` if not set. It must exist."),
            "minResources": _map("What must be free before any pod starts; computed if not set.", dict(QUANTITY)),
            "priorityClass": _text("The PriorityClass of the group of pods."),
        },
    )
    run_policy = _object(
        "How long the job runs, how often it is restarted, and what stays of it.",
        {
            "backoffLimit": _number(
                "After more rounds of restarts than this the job has failed. If not set, the label fault-retry-times "
                "counts; without that there is no limit."
            ),
            "cleanPodPolicy": _choice(
                "Which pods are deleted when the job has ended: All, Running or None (the default).",
                *("All", "Running", "None"),
            ),
            "ttlSecondsAfterFinished": _number("The job is deleted so many seconds after its end; never if not set."),
            "activeDeadlineSeconds": _number(
                "The job fails if it hasn't ended so many seconds after its start.", "int64"
            ),
            "schedulingPolicy": scheduling,
        },
    )
    return _object(
        "What the job shall be.",
        {
            "replicaSpecs": _map("The pods by type: Master, Chief or Scheduler leads, Worker follows.", replica),
            "runPolicy": run_policy,
            "schedulerName": _text("The scheduler of the pods; volcano if not set and gang scheduling is on."),
            "successPolicy": _text(
                "When the job has succeeded: AllWorkers (every pod has) or empty (one has, none runs or has failed)."
            ),
        },
        ("replicaSpecs",),
    )


def _status() -> Object:
    condition = _object(
        "One thing that is true of the job, or was.",
        {
            "type": _text("Created, Running, Restarting, Succeeded or Failed."),
            "status": _text("True, False or Unknown."),
            "reason": _text("Why, in one word."),
            "message": _text("Why, in a sentence."),
            "lastUpdateTime": _time("When the condition was written last."),
            "lastTransitionTime": _time("When its status changed last."),
        },
        ("type", "status"),
    )
    replica = _object(
        "Pods of one type by what became of them.",
        {
            "active": _number("Pods that run."),
            "succeeded": _number("Pods that have succeeded."),
            "failed": _number("Pods that have failed."),
            "labelSelector": {
                "type": "object",
                "description": "Not used.",
                "x-kubernetes-preserve-unknown-fields": True,
            },
        },
    )
    restarts = _object(
        "What the operator remembers of restarts.",
        {
            "count": _number("Rounds of restarts, whatever their cause."),
            "retries": _number("Rounds that began because a pod had failed."),
            "floor": _number("Pods of earlier rounds than this one are deleted."),
            "doomed": {"type": "array", "items": {"type": "string"}, "description": "The uids of pods to be deleted."},
            "created": _map("Pods of each type when all of them existed last.", {"type": "integer", "format": "int32"}),
        },
    )
    return _object(
        "What the job is.",
        {
            "conditions": {
                "type": "array",
                "items": condition,
                "description": "The last one is the state of the job.",
            },
            "replicaStatuses": _map("Pods by type.", replica),
            "startTime": _time("When the operator began to make pods."),
            "completionTime": _time("When the job succeeded or failed."),
            "lastReconcileTime": _time("When the operator found that the job has to wait for the scheduler."),
            "restarts": restarts,
        },
        ("conditions", "replicaStatuses"),
    )
