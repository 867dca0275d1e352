"""What names, labels and annotations may look like. Each check returns what is wrong, in Kubernetes' words, or ''."""

from __future__ import annotations

import re

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_CONFIG_KEY = re.compile(r"[-._a-zA-Z0-9]+")


def _too_long(limit: int) -> str:
    return f"must be no more than {limit} bytes"


def label_problem(value: str) -> str:
    """RFC 1123 label: names of namespaces, containers, volumes."""
    if len(value) > 63:
        return _too_long(63)
    if _LABEL.fullmatch(value):
        return ""
    return (
        "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end "
        "with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
        "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
    )


def label_1035_problem(value: str) -> str:
    """RFC 1035 label: names of services."""
    if len(value) > 63:
        return _too_long(63)
    if _LABEL_1035.fullmatch(value):
        return ""
    return (
        "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic "
        "character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for "
        "validation is '[a-z]([-a-z0-9]*[a-z0-9])?')"
    )


def subdomain_problem(value: str) -> str:
    """RFC 1123 subdomain: names of nearly everything."""
    if len(value) > 253:
        return _too_long(253)
    if _SUBDOMAIN.fullmatch(value):
        return ""
    return (
        "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start "
        "and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
        "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
    )


def qualified_name_problem(key: str) -> str:
    """Keys of labels and annotations, names of resources and of finalizers: `[prefix/]name`."""
    prefix, slash, name = key.partition("/")
    if not slash:
        prefix, name = "", key
    if slash and "/" in name:
        return (
            "a qualified name must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an "
            "alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
            "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]') with an optional DNS subdomain prefix and '/' (e.g. "
            "'example.com/MyName')"
        )
    if slash:
        if not prefix:
            return "prefix part must be non-empty"
        problem = subdomain_problem(prefix)
        if problem:
            return f"prefix part {problem}"
    if not name:
        return "name part must be non-empty"
    if len(name) > 63:
        return f"name part {_too_long(63)}"
    if not _QUALIFIED.fullmatch(name):
        return (
            "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an "
            "alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
            "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
        )
    return ""


def label_value_problem(value: str) -> str:
    if len(value) > 63:
        return _too_long(63)
    if not value or _QUALIFIED.fullmatch(value):
        return ""
    return (
        "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start "
        "and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for "
        "validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
    )


def config_key_problem(key: str) -> str:
    """Keys of ConfigMaps and Secrets, which become file names."""
    if len(key) > 253:
        return _too_long(253)
    if not _CONFIG_KEY.fullmatch(key):
        return (
            "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or "
            "'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')"
        )
    if key in (".", ".."):
        return f'must not be "{key}"'
    if key.startswith(".."):
        return 'must not start with ".."'
    return ""
