"""Streams of a replica's events that fail: the replica stays in use, and the stream comes back."""

import asyncio
import logging

import pytest

from baton.common.errors import UnavailableError
from baton.v1 import worker_pb2
from router.fleet import kv_events
from tests.support.fake_workers import FakeDecode
from tests.support.running_router import request, running_router, token_ids_of

KEYS = [bytes([i]) * 32 for i in range(6)]
SCRIPT = [50 + i for i in range(20)]


def snapshot(number, *keys):
    response = worker_pb2.WatchKvEventsResponse()
    response.events.add(sequence_number=number).cleared.SetInParent()
    response.events.add(sequence_number=number).stored.keys.extend(keys)
    return response


def stored(number, keys, parent):
    response = worker_pb2.WatchKvEventsResponse()
    stored = response.events.add(sequence_number=number).stored
    stored.keys.extend(keys)
    stored.parent = parent
    return response


class ScriptedEvents(FakeDecode):
    """A decode worker. Each of its streams of events sends one list of messages.

    Attributes:
        streams: the lists; a stream fails after its list if that ends with None.
        num_streams: how many were opened.
    """

    def __init__(self, *streams, **info):
        super().__init__(SCRIPT, num_blocks=100, **info)
        self.streams, self.num_streams = list(streams), 0

    async def watch_kv_events(self):
        self.num_streams += 1
        for message in self.streams[min(self.num_streams, len(self.streams)) - 1]:
            if message is None:
                raise UnavailableError("no events now")
            yield message
        await asyncio.Event().wait()


def believed(router):
    (replica,) = router.fleet.decode.candidates
    match = router.fleet._index.match(KEYS, 1000)
    return match.blocks(replica.replica_id), replica.kv_events.cache.has_events


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the index notifies nobody
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("streams", "problem"),
    [
        ([[snapshot(3, *KEYS[:2]), None], [snapshot(7, *KEYS[:4])]], "no events now"),
        (
            [[snapshot(3, *KEYS[:2]), stored(5, KEYS[2:3], KEYS[1])], [snapshot(7, *KEYS[:4])]],
            "gap",
        ),
        (
            [[snapshot(3, *(bytes([i]) for i in range(101)))], [snapshot(7, *KEYS[:4])]],
            "100 blocks",
        ),
    ],
)
async def test_a_stream_that_fails_is_opened_again(caplog, streams, problem):
    caplog.set_level(logging.INFO, logger="baton.router")
    async with ScriptedEvents(*streams) as worker, running_router(worker) as router:
        await until(lambda: believed(router) == (4, True))
        assert router.candidate_ids() == {worker.info.worker_id}
        assert worker.num_streams == 2
        absent = [r for r in caplog.records if "are absent" in r.getMessage()]
        assert len(absent) == 1
        assert {"gap": "follows event 3"}.get(problem, problem) in absent[0].getMessage()
        assert any("are back" in record.getMessage() for record in caplog.records)


async def test_without_events_the_router_knows_what_it_sent():
    async with ScriptedEvents([None]) as worker, running_router(worker) as router:
        await until(lambda: worker.num_streams > 1)
        assert token_ids_of(await router.generate(request(max_tokens=5))) == SCRIPT[:5]
        (counts,) = router.fleet.cache_counts()
        assert counts.lacks_events
        (replica,) = router.fleet.decode.candidates
        assert replica.kv_events.cache.num_expected == 10


async def test_a_replica_without_a_prefix_cache_is_not_followed():
    async with (
        ScriptedEvents([snapshot(1)], caches_prefixes=False) as worker,
        running_router(worker) as router,
    ):
        await router.generate(request(max_tokens=5))
        assert list(router.fleet.cache_counts()) == []
        assert worker.num_streams == len(router.fleet._index) == 0


async def test_a_stream_that_is_behind_is_opened_again(monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_STALENESS_S", 0.2)
    streams = [snapshot(3, *KEYS[:2])], [snapshot(7, *KEYS[:4])]
    async with ScriptedEvents(*streams) as worker, running_router(worker) as router:
        await until(lambda: believed(router) == (2, True))
        worker.current_load.newest_kv_event = 7
        await until(lambda: believed(router) == (4, True))
        assert worker.num_streams == 2
        (counts,) = router.fleet.cache_counts()
        assert counts.staleness_s == 0.0
        assert counts.believed == 4
