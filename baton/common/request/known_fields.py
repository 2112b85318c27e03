"""`check_known`: refuses messages with fields or values that this build does not know.

A newer sender asks for something by them. A receiver that dropped them would do something else than
it was asked, in silence; so routers refuse clients' messages and workers refuse routers' (ADR 55).
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from baton.common.errors import FailedPreconditionError, InvalidArgumentError, Reason

__all__ = ["check_known", "check_value"]

_MAX_ENTRIES = 1024
"""As many entries of a list are looked at; no list of messages may have more."""
_MAX_NAMED = 8
"""The most unknown fields that an error names."""


def check_known(message: Message, receiver: str, sender: str, path: str = "") -> None:
    """Refuses a message if it, or a message in it, has an unknown field or value.

    Args:
        message: the message.
        receiver: "router" or "worker", for errors.
        sender: who made the message.
        path: its name. If it is empty, the names of its fields stand alone.

    Raises:
        FailedPreconditionError: names the fields by their numbers, which alone are on the wire.
        InvalidArgumentError: the value of an enumeration is unknown; names the field and the
            values that it may have.
    """
    unknown = list(islice(dict.fromkeys(_unknown_parts(message, path)), _MAX_NAMED))
    if unknown:
        raise FailedPreconditionError(
            f"this {receiver} does not know {', '.join(unknown)}; the {sender} is newer: update "
            f"the {receiver}",
            reason=Reason.UNKNOWN_FIELD,
        )


def check_value(field: str, enum: EnumDescriptor, value: Any) -> None:
    """Refuses a number that stands for no value of an enumeration.

    Raises:
        InvalidArgumentError: names the field and the values that it may have.
    """
    if value not in enum.values_by_number:
        known = ", ".join(value_type.name for value_type in enum.values)
        raise InvalidArgumentError.for_field(field, value, f"one of {known}")


def _unknown_parts(message: Message, path: str) -> Iterator[str]:
    unknown = UnknownFieldSet(message)
    for index in range(min(len(unknown), _MAX_ENTRIES)):
        place = path or message.DESCRIPTOR.name
        yield f"field {unknown[index].field_number} of {place}"
    for field, value in message.ListFields():
        name = f"{path}.{field.name}" if path else field.name
        if field.enum_type is not None:  # no message has a list of such values
            check_value(name, field.enum_type, value)
        elif isinstance(value, Message):
            yield from _unknown_parts(value, name)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for index, entry in enumerate(islice(value, _MAX_ENTRIES)):
                yield from _unknown_parts(entry, f"{name}[{index}]")
