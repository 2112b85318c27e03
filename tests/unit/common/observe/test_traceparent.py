"""`traceparent` headers: what is valid, and what becomes of everything else."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.observe.traceparent import TraceContext, parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"


def test_a_header_is_read_and_written():
    context = parse_traceparent(VALID)
    assert context == TraceContext(TRACE, SPAN, is_sampled=True)
    assert context.header == VALID


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("03", True)]
)
def test_the_lowest_bit_of_the_flags_says_whether_it_is_sampled(flags, is_sampled):
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}").is_sampled is is_sampled


@pytest.mark.parametrize("more", ["", "-", "-what-the-future-will-be"])
def test_later_versions_may_have_more_fields(more):
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01{more}").trace_id == TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        VALID + "-more",
        VALID + "\n",
        " " + VALID,
        VALID.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"cc-{TRACE}-{SPAN}-01.",
        f"cc-{TRACE}-{SPAN}-01-" + "a" * 300,
        VALID.replace("4", "\u0664"),  # a digit, but not an ASCII one
    ],
)
def test_other_headers_are_ignored(header):
    assert parse_traceparent(header) is None


@given(st.text() | st.from_regex(re.compile(r"[0-9a-f]{2}-[0-9a-f]*-[0-9a-f]*-[0-9a-f]*")))
def test_any_text_is_valid_or_ignored(text):
    context = parse_traceparent(text)
    if context is not None:
        assert parse_traceparent(context.header) == context
        assert text[3:55] == f"{context.trace_id}-{context.span_id}-{text[53:55]}"


def test_a_child_has_a_span_id_of_its_own():
    context = parse_traceparent(VALID)
    child = context.child()
    assert child.trace_id == context.trace_id
    assert child.is_sampled is context.is_sampled
    assert child.span_id != context.span_id


def test_the_sample_rate_is_kept():
    assert all(TraceContext.new(1.0).is_sampled for _ in range(100))
    assert not any(TraceContext.new(0.0).is_sampled for _ in range(100))
    assert 300 < sum(TraceContext.new(0.5).is_sampled for _ in range(1000)) < 700
