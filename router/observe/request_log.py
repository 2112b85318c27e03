"""`RequestLog`: the records of the requests that ended last, and the spans made from them."""

import heapq
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter

from baton.common.observe.traceparent import TraceContext
from router.observe.activity import Activity
from router.observe.metrics import RouterMetrics
from router.observe.request_record import RequestRecord
from router.observe.request_timeline import spans_of
from rpc.logs import CURRENT_CALL, CallInfo
from rpc.tracing import Tracer

__all__ = ["RequestLog"]

_CAPACITY = 1000


class RequestLog:
    """Begins and keeps records.

    A record is kept as bytes. Its some forty small objects would lie between those of requests
    that ran beside it, whose pages Python could not return after a burst. Its classes have no
    slots, which would make the bytes twice as slow to write.

    Args:
        tracer: sends spans; None sends none.
        metrics: counts each request that has ended; None counts none.
        capacity: how many records are kept.

    Attributes:
        activity: their errors and recent times.
    """

    def __init__(
        self,
        tracer: Tracer | None = None,
        metrics: RouterMetrics | None = None,
        capacity: int = _CAPACITY,
    ) -> None:
        self._tracer = tracer
        self._metrics = metrics
        self._capacity = capacity
        self._ended: dict[str, tuple[float, bytes]] = {}  # with how long each took
        self.activity = Activity()

    def begin(self, request_id: str, model: str, operation: str) -> RequestRecord:
        """Returns the record of a request that the present call has brought.

        Args:
            request_id: the client's name for the request.
            model: the model's name.
            operation: text_completion or chat.
        """
        call = CURRENT_CALL.get() or CallInfo()
        record = RequestRecord(
            request_id=request_id,
            model=model,
            operation=operation,
            is_awaited=call.is_counted,
            arrived_at=call.started_at,
        )
        if call.trace is not None:
            record.traceparent = call.trace.header
            record.parent_span_id = call.trace.span_id
        if self._tracer is not None:
            parent = call.trace
            record.trace = parent.child() if parent else TraceContext.new(self._tracer.sample_rate)
            call.trace_id = record.trace.trace_id
        return record

    @contextmanager
    def recording(self, record: RequestRecord, deadline: float) -> Iterator[None]:
        """Ends the record with the context, keeps it and sends its spans.

        Args:
            record: one that `begin` returned.
            deadline: `time.monotonic()` at which the request must have ended.
        """
        try:
            yield
        except BaseException as error:
            record.end(error, deadline)
            raise
        else:
            record.end(None, deadline)
        finally:
            self._keep(record)

    def count_refusal(self, reason: str) -> None:
        """Counts a request that got no record, as it was refused before anything was done."""
        if self._metrics is not None:
            self._metrics.count_refusal(reason)

    def find(self, request_id: str) -> RequestRecord | None:
        """Returns the last record of this id; None if there is none, or it was dropped."""
        kept = self._ended.get(request_id)
        return None if kept is None else _unpacked(kept[1])

    def latest(self, count: int) -> Sequence[RequestRecord]:
        """Returns the last records, the last one first."""
        return [_unpacked(packed) for _, packed in islice(reversed(self._ended.values()), count)]

    def slowest(self, count: int) -> Sequence[RequestRecord]:
        """Returns those of the kept records that took longest, the longest first."""
        kept = heapq.nlargest(count, self._ended.values(), key=itemgetter(0))
        return [_unpacked(packed) for _, packed in kept]

    def _keep(self, record: RequestRecord) -> None:
        if self._metrics is not None:
            self._metrics.count_request(record)
        self.activity.ended(record)
        self._ended.pop(record.request_id, None)  # so that the new one is the last
        packed = pickle.dumps(record, pickle.HIGHEST_PROTOCOL)
        self._ended[record.request_id] = (record.ms_since_arrival(record.ended_at), packed)
        if len(self._ended) > self._capacity:
            del self._ended[next(iter(self._ended))]
        if self._tracer is not None:
            self._tracer.send(spans_of(record))


def _unpacked(packed: bytes) -> RequestRecord:
    record: RequestRecord = pickle.loads(packed)  # noqa: S301 (this process has made the bytes)
    return record
