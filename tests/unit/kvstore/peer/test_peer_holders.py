"""Which process lends which slices: parameters of handoffs, and the objects of a load."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.addresses import join_host_port
from baton.v1.kv_peer_pb2 import KvPeerParams
from kvstore.connector import SavedSlices
from kvstore.peer.address import PeerAddress, holders_of, join_params, select_held


def address_of(rank: int) -> PeerAddress:
    return PeerAddress(f"10.0.0.1:{7000 + rank}", bytes([rank + 1] * 16))


def saved(rank: int, *slices: int) -> SavedSlices:
    return SavedSlices(address_of(rank).to_params("grpc"), slices)


def test_one_process_lends_all_slices():
    address = PeerAddress(join_host_port("::1", 70), b"g" * 16)
    assert address.endpoint == "[::1]:70"
    assert holders_of(address.to_params("grpc"), (0, 7)) == (address, address)


def test_readers_of_one_process_find_the_first_rank_of_several():
    """Engines from before there were ranks read what they find there, and compute the rest."""
    message = KvPeerParams.FromString(join_params([saved(0, 0), saved(1, 1)]))
    assert PeerAddress(message.endpoint, message.generation) == address_of(0)


@given(st.data())
def test_each_slice_is_found_where_it_is_lent(data):
    num_slices = data.draw(st.integers(1, 12))
    rank_of = data.draw(st.lists(st.integers(0, 4), min_size=num_slices, max_size=num_slices))
    slices_of = {
        rank: [number for number in range(num_slices) if rank_of[number] == rank]
        for rank in set(rank_of)
    }
    params = join_params([saved(rank, *slices) for rank, slices in slices_of.items()])
    wanted = data.draw(st.lists(st.integers(0, num_slices - 1)))
    assert holders_of(params, wanted) == tuple(address_of(rank_of[number]) for number in wanted)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (b"", "name no peer"),
        (b"\xff", "cannot be read"),
        (PeerAddress("", b"g").to_params("grpc"), "name no peer"),
        (PeerAddress("host:1", b"").to_params("grpc"), "name no peer"),
        (
            join_params([saved(0, 0), SavedSlices(PeerAddress("", b"g").to_params("grpc"), (1,))]),
            "name no peer",
        ),
        (join_params([saved(0, 0), saved(1, 2)]), "name no peer for slice 1 of a block"),
    ],
    ids=["empty", "garbage", "no endpoint", "no generation", "a nameless rank", "a missing slice"],
)
def test_invalid_parameters_are_refused(params, message):
    with pytest.raises(ValueError, match=f"connector_params {message}"):
        holders_of(params, (0, 1))


@given(st.data())
def test_a_piece_of_a_load_is_divided_among_the_processes(data):
    holders = [address_of(rank) for rank in data.draw(st.lists(st.integers(0, 3), min_size=1))]
    num_objects = len(holders) * data.draw(st.integers(1, 5))
    first = data.draw(st.integers(0, num_objects - 1))
    piece = range(first, data.draw(st.integers(first, num_objects)))
    found = {
        holder: select_held(piece, first, holders, holder) for holder in dict.fromkeys(holders)
    }
    assert sorted(chain.from_iterable(found.values())) == list(piece)
    for holder, objects in found.items():
        assert all(holders[number % len(holders)] == holder for number in objects)
