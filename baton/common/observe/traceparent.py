"""`TraceContext`: the place of a request in a trace, and its W3C `traceparent` header.

https://www.w3.org/TR/trace-context/ describes the header. This module imports no tracing library:
a process that sends no spans still passes the context on and writes its trace id to the log.
"""

import re
import secrets
from dataclasses import dataclass

__all__ = ["TraceContext", "parse_traceparent"]

_HEADER = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<rest>-[\x21-\x7e]*)?"
)
_MAX_LENGTH = 256
_INVALID_VERSION = "ff"
_SAMPLED = 0x01
_RATIO_BITS = 64


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of a trace, as its children see it.

    Attributes:
        trace_id: 32 hex digits, not all 0.
        span_id: 16 hex digits, not all 0.
        is_sampled: whether spans of this trace are recorded.
    """

    trace_id: str
    span_id: str
    is_sampled: bool

    @classmethod
    def new(cls, sample_rate: float) -> "TraceContext":
        """Begins a trace.

        Args:
            sample_rate: the share of traces that are recorded, in [0, 1]. The trace id decides, by
                the rule of OpenTelemetry's TraceIdRatioBased.
        """
        trace_id = _random_hex(16)
        bound = round(sample_rate * 2**_RATIO_BITS)
        return cls(trace_id, _random_hex(8), int(trace_id[16:], 16) < bound)

    def child(self) -> "TraceContext":
        """Returns the context of a new span below this one."""
        return TraceContext(self.trace_id, _random_hex(8), self.is_sampled)

    @property
    def header(self) -> str:
        """The value of a `traceparent` header."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


def parse_traceparent(header: str) -> TraceContext | None:
    """Reads a `traceparent` header; None for one that is not valid, which W3C's rules ignore.

    Later versions of the header may have more fields after the four of version 00.
    """
    if len(header) > _MAX_LENGTH:
        return None
    match = _HEADER.fullmatch(header)
    if match is None or match["version"] == _INVALID_VERSION:
        return None
    if match["rest"] is not None and match["version"] == "00":
        return None
    if not int(match["trace"], 16) or not int(match["span"], 16):
        return None
    return TraceContext(match["trace"], match["span"], bool(int(match["flags"], 16) & _SAMPLED))


def _random_hex(num_bytes: int) -> str:
    """Random digits that are not all 0."""
    while not any(drawn := secrets.token_bytes(num_bytes)):
        pass
    return drawn.hex()
