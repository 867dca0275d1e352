"""Questions about the user: there is one, who may do everything. `kubectl auth can-i` and other tools ask."""

from __future__ import annotations

from evertrain.kube.port import Object

USER = "kubernetes-admin"
_GROUPS = ["system:masters", "system:authenticated"]
_EVERYTHING = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
_STATUS: dict[tuple[str, str], tuple[str, Object]] = {
    ("authorization.k8s.io/v1", "selfsubjectaccessreviews"): (
        "SelfSubjectAccessReview",
        {"allowed": True, "reason": "the only user is cluster administrator"},
    ),
    ("authorization.k8s.io/v1", "selfsubjectrulesreviews"): (
        "SelfSubjectRulesReview",
        {
            "resourceRules": [_EVERYTHING],
            "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
            "incomplete": False,
        },
    ),
    ("authentication.k8s.io/v1", "selfsubjectreviews"): (
        "SelfSubjectReview",
        {"userInfo": {"username": USER, "groups": _GROUPS}},
    ),
}


def review(path: str) -> Object | None:
    """The answer to a POST; None if the path is none of a review."""
    parts = path.strip("/").split("/")
    if len(parts) != 4 or parts[0] != "apis":
        return None
    version = f"{parts[1]}/{parts[2]}"
    found = _STATUS.get((version, parts[3]))
    if found is None:
        return None
    kind, status = found
    return {"kind": kind, "apiVersion": version, "metadata": {"creationTimestamp": None}, "spec": {}, "status": status}
