"""What nobody should ask ClusterD: any method, its fields filled by chance, and every third damaged in its bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from tests.clusterd.client import Method, methods

WORDS = (
    "", "0", "1", "-1", "3", "99999", "x", "x" * 3000, "\0", "é" * 20, "retry", "recover", "recover-in-place", "dump",
    "exit", "downgrade", "upgrade", "taskd", "CCAgent", "ranks", "default/victim", "occur", "1.0", "true", "400", "[]",
)  # fmt: skip
NUMBERS = (0, 1, 2, 3, -1, 7, 200, 201, 400, 404, 405, 406, 499, 2**31 - 1, -(2**31))
LARGE = (2**63 - 1, -(2**63), 1_760_000_000_000)


class Requests:
    """All of it follows from the seed and the names of the jobs."""

    def __init__(self, seed: int, jobs: Sequence[str]) -> None:
        self.random = random.Random(seed)
        self._jobs = (*jobs, *jobs, *jobs, "", "nobody", "x" * 300)

    def any(self) -> tuple[Method, bytes]:
        method = self.random.choice(list(methods().values()))
        message = method.request()
        self._fill(message)
        content = bytearray(message.SerializeToString())
        if self.random.random() < 0.3:
            for _ in range(self.random.randrange(1, 4)):
                at = self.random.randrange(len(content) + 1)
                content[at : at + self.random.randrange(2)] = self.random.randbytes(self.random.randrange(3))
        return method, bytes(content)

    def _fill(self, message: Any) -> None:
        for field in message.DESCRIPTOR.fields:
            named = field.name.lower() == "jobid"
            if self.random.random() < (0.02 if named else 0.2):
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                self._fill_map(getattr(message, field.name), field.message_type.fields_by_name["value"])
            elif field.label == FieldDescriptor.LABEL_REPEATED:
                values = getattr(message, field.name)
                for _ in range(self.random.choice((0, 1, 1, 2, 40))):
                    if field.message_type is None:
                        values.append(self._value(field))
                    else:
                        self._fill(values.add())
            elif field.message_type is not None:
                self._fill(getattr(message, field.name))
            else:
                setattr(message, field.name, self.random.choice(self._jobs) if named else self._value(field))

    def _fill_map(self, entries: Any, value: FieldDescriptor) -> None:
        for _ in range(self.random.choice((0, 1, 2, 40))):
            key = self.random.choice((*WORDS, "victim-node-0", "victim-node-1"))
            if value.message_type is None:
                entries[key] = self._value(value)
            else:
                self._fill(entries[key])

    def _value(self, field: FieldDescriptor) -> Any:
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            return self.random.choice(WORDS)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return self.random.random() < 0.5
        if field.cpp_type == FieldDescriptor.CPPTYPE_INT64:
            return self.random.choice((*NUMBERS, *LARGE))
        return self.random.choice(NUMBERS)
