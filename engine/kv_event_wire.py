"""The prefix cache's events as `baton.v1` messages: pure functions."""

from collections.abc import Iterator, Sequence

from baton.v1 import worker_pb2
from engine.kv_events import BlocksRemoved, BlocksStored, KvEvent

__all__ = ["kv_event_responses"]

_MAX_KEYS = 2**16
"""Keys in one message; keeps it well below rpc.options.MAX_MESSAGE_BYTES."""


def kv_event_responses(events: Sequence[KvEvent]) -> Iterator[worker_pb2.WatchKvEventsResponse]:
    """The events in as few messages as they fit in. One with more keys than a message
    holds becomes several of its number.
    """
    response, num_keys = worker_pb2.WatchKvEventsResponse(), 0
    for event in events:
        for part in _parts(event):
            if num_keys + len(_keys(part)) > _MAX_KEYS:
                yield response
                response, num_keys = worker_pb2.WatchKvEventsResponse(), 0
            response.events.append(_message(part))
            num_keys += len(_keys(part))
    if response.events:
        yield response


def _parts(event: KvEvent) -> Iterator[KvEvent]:
    keys = _keys(event)
    if len(keys) <= _MAX_KEYS:
        yield event
        return
    for start in range(0, len(keys), _MAX_KEYS):
        part = keys[start : start + _MAX_KEYS]
        if isinstance(event, BlocksStored):
            yield BlocksStored(event.sequence_number, part, _parent(event, start))
        else:
            yield BlocksRemoved(event.sequence_number, part)


def _parent(event: BlocksStored, start: int) -> bytes | None:
    """What the part from `start` on follows; a snapshot's keys, which have no order, nothing."""
    return event.keys[start - 1] if start and event.parent is not None else event.parent


def _keys(event: KvEvent) -> tuple[bytes, ...]:
    return event.keys if isinstance(event, BlocksStored | BlocksRemoved) else ()


def _message(event: KvEvent) -> worker_pb2.KvEvent:
    message = worker_pb2.KvEvent(sequence_number=event.sequence_number)
    match event:
        case BlocksStored(_, keys, parent):
            message.stored.keys.extend(keys)
            if parent is not None:
                message.stored.parent = parent
        case BlocksRemoved(_, keys):
            message.removed.keys.extend(keys)
        case _:
            message.cleared.SetInParent()
    return message
