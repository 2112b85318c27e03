"""`parse_form`: the fields of a `multipart/form-data` body (RFC 7578)."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from baton.common.errors import InvalidArgumentError

__all__ = ["FILES_PATH", "FormField", "is_form", "parse_form"]

FILES_PATH = "/v1/files"
"""The only path whose bodies are forms."""

_KIND = "multipart/form-data"
_MAX_FIELDS = 16
_MAX_HEAD_BYTES = 8192
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
_DISPOSITION = re.compile(
    rb"^content-disposition:\s*form-data\s*(;[^\r\n]*)", re.IGNORECASE | re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of a form.

    Attributes:
        value: its bytes.
        filename: the file's that the client sent; None for other values.
    """

    value: memoryview
    filename: str | None = None

    @property
    def text(self) -> str:
        """The value as text; what is no UTF-8 is replaced."""
        return str(self.value, "utf-8", "replace")


def is_form(content_type: str) -> bool:
    """Whether a body with this content type is a form."""
    return content_type.partition(";")[0].strip().lower() == _KIND


def parse_form(content_type: str, body: bytes) -> Mapping[str, FormField]:
    """The fields of a form by name; their values are not copied.

    Args:
        content_type: of the body; names the boundary.
        body: the body.

    Raises:
        InvalidArgumentError: the body is no such form.
    """
    boundary = _BOUNDARY.search(content_type)
    if not is_form(content_type) or boundary is None:
        raise InvalidArgumentError(f"the body must be {_KIND} with a boundary")
    delimiter = b"--" + (boundary[1] or boundary[2]).encode("latin-1", "replace")
    fields: dict[str, FormField] = {}
    for start, end in _parts(body, delimiter):
        if len(fields) >= _MAX_FIELDS:
            raise InvalidArgumentError(f"the form has more than {_MAX_FIELDS} fields")
        name, field = _field(body, start, end)
        if name in fields:
            raise InvalidArgumentError(f"{name[:64]} is set twice")
        fields[name] = field
    return fields


def _parts(body: bytes, delimiter: bytes) -> Iterator[tuple[int, int]]:
    """Yields where the parts of a form begin and end.

    Raises:
        InvalidArgumentError: the form has no end.
    """
    position = body.find(delimiter)
    while position >= 0:
        start = position + len(delimiter)
        if body[start : start + 2] == b"--":
            return
        start = body.find(b"\r\n", start) + 2
        position = body.find(b"\r\n" + delimiter, start - 2)
        if start < 2 or position < 0:
            break
        yield start, position
        position += 2
    raise InvalidArgumentError("the body is a form without an end")


def _field(body: bytes, start: int, end: int) -> tuple[str, FormField]:
    """The name and the field of a part."""
    head_end = body.find(b"\r\n\r\n", start, min(end + 2, start + _MAX_HEAD_BYTES))
    disposition = _DISPOSITION.search(body[start:head_end]) if head_end >= 0 else None
    if disposition is None:
        raise InvalidArgumentError("a part of the form has no Content-Disposition: form-data")
    parameters = {
        match[1].lower(): re.sub(r"\\(.)", r"\1", match[2])
        for match in _PARAMETER.finditer(disposition[1].decode(errors="replace"))
    }
    if "name" not in parameters:
        raise InvalidArgumentError("a part of the form has no name")
    value = memoryview(body)[min(head_end + 4, end) : end]
    return parameters["name"], FormField(value, parameters.get("filename"))
