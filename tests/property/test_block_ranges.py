"""`BlockRanges` and `BlockLocations` against lists of ranges; malformed messages are refused."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import kv_peer_pb2 as pb
from kvstore.codec import HEADER_BYTES
from kvstore.peer.locations import BlockLocations, BlockRanges, ranges_from_proto, ranges_to_proto
from kvstore.peer.transport import make_ranges

RANGE = st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 2**40), st.integers(0, 15))
BLOCKS = st.lists(st.lists(RANGE, max_size=5), max_size=8)


def locations_of(blocks):
    runs = [run for block in blocks for run in block]
    table = make_ranges(*map(list, zip(*runs, strict=True))) if runs else make_ranges([], 0)
    counts = np.array([len(block) for block in blocks], np.int64)
    headers = b"".join(bytes([index]) * HEADER_BYTES for index in range(len(blocks)))
    return BlockLocations(headers, BlockRanges(table, counts))


def as_lists(ranges):
    runs = iter([tuple(run) for run in ranges.table.tolist()])
    return [[next(runs) for _ in range(count)] for count in ranges.counts]


@given(blocks=BLOCKS)
def test_locations_are_unchanged_by_encoding_and_decoding(blocks):
    sent = locations_of(blocks)
    message = pb.KvBlockLocations.FromString(sent.to_proto().SerializeToString())
    received = BlockLocations.from_proto(message)
    assert received.headers == sent.headers
    assert as_lists(received.ranges) == blocks


@given(blocks=BLOCKS, data=st.data())
def test_select_returns_the_wanted_blocks_in_their_order(blocks, data):
    wanted = data.draw(st.lists(st.integers(0, len(blocks) - 1)) if blocks else st.just([]))
    found = locations_of(blocks).select(wanted)
    assert as_lists(found.ranges) == [blocks[index] for index in wanted]
    assert found.headers == b"".join(bytes([index]) * HEADER_BYTES for index in wanted)


@given(blocks=BLOCKS)
def test_num_reachable_counts_the_leading_blocks_that_have_ranges(blocks):
    lengths = [len(block) for block in blocks]
    expected = lengths.index(0) if 0 in lengths else len(lengths)
    assert locations_of(blocks).ranges.num_reachable == expected


@given(blocks=BLOCKS, data=st.data())
def test_parts_of_divides_places_like_the_ranges_of_their_blocks(blocks, data):
    sizes = [sum(run[1] for run in block) for block in blocks]
    starts = [data.draw(st.integers(0, 2**50)) for _ in blocks]
    parts = locations_of(blocks).ranges.parts_of(make_ranges(starts, sizes, 3))
    expected = []
    for block, start in zip(blocks, starts, strict=True):
        before = accumulate((run[1] for run in block), initial=start)
        expected += [[place, run[1], 3] for place, run in zip(before, block, strict=False)]
    assert parts.tolist() == expected


def test_places_of_other_sizes_than_their_blocks_are_refused():
    ranges = locations_of([[(0, 10, 0), (90, 5, 0)], [(50, 15, 0)]]).ranges
    assert ranges.parts_of(make_ranges([7, 8], 15)).tolist() == [[7, 10, 0], [17, 5, 0], [8, 15, 0]]
    for sizes in ([15, 14], [16, 15], [15], [15, 15, 15]):
        with pytest.raises(ValueError, match=r"block does not have|do not fit"):
            ranges.parts_of(make_ranges(range(len(sizes)), sizes))


def test_inconsistent_messages_are_refused():
    whole = locations_of([[(0, 10, 0), (90, 5, 0)], []]).to_proto()
    assert len(BlockLocations.from_proto(whole)) == 2

    def malformed(change):
        message = pb.KvBlockLocations.FromString(whole.SerializeToString())
        change(message)
        return message

    def shorten(message):
        message.headers = message.headers[1:]

    for change, complaint in (
        (shorten, "127 bytes of headers of 2 blocks"),
        (lambda message: message.num_ranges.append(0), "128 bytes of headers of 3 blocks"),
        (lambda message: message.num_ranges.__setitem__(1, 1), "blocks of 3 ranges, and 2 ranges"),
        (lambda message: message.ranges.num_bytes.append(1), "not equally long"),
    ):
        with pytest.raises(ValueError, match=complaint):
            BlockLocations.from_proto(malformed(change))
    with pytest.raises(ValueError, match="not equally long"):
        ranges_from_proto(pb.KvMemoryRanges(addresses=[1], num_bytes=[2]))
    assert ranges_from_proto(ranges_to_proto(make_ranges([], 0))).shape == (0, 3)
