"""Forms as clients send them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.errors import InvalidArgumentError
from router.http.multipart import parse_form

TYPE = "multipart/form-data; boundary=bound"
NAMES = st.text("abc[]_", min_size=1, max_size=8)


def form_of(fields, boundary=b"bound") -> bytes:
    parts = b"".join(
        b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\nContent-Type: text/plain\r\n\r\n'
        b"%b\r\n" % (boundary, name.encode(), b'; filename="f.txt"' if is_file else b"", value)
        for name, (value, is_file) in fields.items()
    )
    return b"%b--%b--\r\n" % (parts, boundary)


@settings(max_examples=40)
@given(
    st.dictionaries(
        NAMES,
        st.tuples(
            st.one_of(st.binary(max_size=40), st.text("\r\n-bound ", max_size=20).map(str.encode)),
            st.booleans(),
        ),
        max_size=5,
    )
)
def test_fields_come_back_as_they_were(fields):
    if any(b"\r\n--bound" in b"\r\n" + value for value, _ in fields.values()):
        return  # no client takes a boundary that a value contains
    parsed = parse_form(TYPE, form_of(fields))
    shown = {name: (bytes(field.value), field.filename) for name, field in parsed.items()}
    assert shown == {
        name: (value, "f.txt" if is_file else None) for name, (value, is_file) in fields.items()
    }


def test_quoted_boundaries_and_escapes():
    body = (
        b'--a b\r\ncontent-disposition: form-data; name="x"; filename="a\\"b"\r\n\r\n1\r\n--a b--'
    )
    parsed = parse_form('multipart/form-data; boundary="a b"', body)
    assert parsed["x"].filename == 'a"b'
    assert parsed["x"].text == "1"


@pytest.mark.parametrize(
    ("content_type", "body", "message"),
    [
        ("application/json", b"{}", "must be multipart/form-data"),
        ("multipart/form-data", b"", "with a boundary"),
        (TYPE, b"", "without an end"),
        (TYPE, form_of({"a": (b"1", False)})[:-6], "without an end"),
        (TYPE, b"--bound\r\n\r\n1\r\n--bound--", "no Content-Disposition"),
        (TYPE, b"--bound\r\nContent-Disposition: form-data\r\n\r\n1\r\n--bound--", "Disposition"),
        (
            TYPE,
            b"--bound\r\nContent-Disposition: form-data; x=1\r\n\r\n1\r\n--bound--",
            "has no name",
        ),
        (TYPE, form_of({"a": (b"", False)})[:-11] + form_of({"a": (b"", False)}), "a is set twice"),
        (TYPE, form_of({str(i): (b"", False) for i in range(20)}), "more than 16 fields"),
    ],
)
def test_what_is_no_form_is_refused(content_type, body, message):
    with pytest.raises(InvalidArgumentError, match=message):
        parse_form(content_type, body)
