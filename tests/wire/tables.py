"""A second reading of the tables of messages that the reference has, to hold ours against."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

NUMBERS = {"int32": Field.TYPE_INT32, "int64": Field.TYPE_INT64, "uint32": Field.TYPE_UINT32, "bool": Field.TYPE_BOOL}


def read(table: str, package: str = "") -> dict[str, Any]:
    """The message classes that a table describes.

    `name: fields in the order of their numbers`; `*` is repeated, `#` a map from strings, `-` a number without a field.
    """
    file = FileDescriptorProto(name="second-reading.proto", syntax="proto3", package=package)
    scope = f".{package}." if package else "."
    for line in table.strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields.split(), 1):
            if text == "-":
                continue
            label, _, kind = text.partition(":")
            field = message.field.add(name=label.rstrip("*#"), number=number, label=Field.LABEL_OPTIONAL)
            if label.endswith("#"):
                entry = message.nested_type.add(name=f"{field.name[0].upper()}{field.name[1:]}Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL)
                value = entry.field.add(name="value", number=2, label=Field.LABEL_OPTIONAL)
                if kind:
                    value.type, value.type_name = Field.TYPE_MESSAGE, f"{scope}{kind}"
                else:
                    value.type = Field.TYPE_STRING
                field.type, field.type_name = Field.TYPE_MESSAGE, f"{scope}{name}.{entry.name}"
            elif kind and kind not in NUMBERS:
                field.type, field.type_name = Field.TYPE_MESSAGE, f"{scope}{kind}"
            else:
                field.type = NUMBERS.get(kind, Field.TYPE_STRING)
            if label[-1] in "*#":
                field.label = Field.LABEL_REPEATED
    pool = DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName(file.name)
    return {name: GetMessageClass(descriptor) for name, descriptor in found.message_types_by_name.items()}


def fill(message: Any, depth: int = 0) -> Any:
    """Give every field a value that shows its number and type."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entries = getattr(message, field.name)
            for key in ("a", "b"):
                if field.message_type.fields_by_name["value"].message_type is None:
                    entries[key] = f"{key}-{depth}"
                else:
                    fill(entries[key], depth + 1)
        elif field.message_type is not None:
            target = getattr(message, field.name)
            for _ in range(2 if hasattr(target, "add") else 1):
                fill(target.add() if hasattr(target, "add") else target, depth + 1)
        else:
            value: Any = f"{field.name}-{depth}"
            if field.type != Field.TYPE_STRING:
                value = True if field.type == Field.TYPE_BOOL else 300 + field.number
            if hasattr(getattr(message, field.name), "extend"):
                getattr(message, field.name).extend([value, value])
            else:
                setattr(message, field.name, value)
    return message
