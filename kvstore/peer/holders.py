"""Which process lends which slices of the blocks of a handoff. Pure.

An engine of several ranks saves each block in slices (`kvstore.transfer_form`), and each rank lends
those of its own part of the model. The `connector_params` of its handoffs name all these ranks.
"""

from collections.abc import Sequence
from itertools import compress, cycle
from typing import TypeVar

from google.protobuf.message import DecodeError

from baton.v1.kv_peer_pb2 import KvPeerParams
from kvstore.connector import SavedSlices
from kvstore.peer.address import PeerAddress

__all__ = ["holders_of", "join_params", "select_held"]

_Item = TypeVar("_Item")


def join_params(ranks: Sequence[SavedSlices]) -> bytes:
    """Returns the `connector_params` of a handoff whose blocks several ranks lend.

    Args:
        ranks: what each of them lends; at least one.
    """
    first, *others = (_with_slices(rank) for rank in ranks)
    first.others.extend(others)
    return first.SerializeToString()


def holders_of(params: bytes, slices: Sequence[int]) -> tuple[PeerAddress, ...]:
    """Returns the process that lends each of some slices, by the `connector_params` of a handoff.

    Raises:
        ValueError: they cannot be read, or name no process for a slice.
    """
    try:
        first = KvPeerParams.FromString(params)
    except DecodeError as error:
        raise ValueError("the handoff's connector_params cannot be read") from error
    lenders = [(_address_from_proto(message), message.slices) for message in (first, *first.others)]
    return tuple(_find_holder(number, lenders) for number in slices)


def select_held(
    items: Sequence[_Item], first: int, holders: Sequence[PeerAddress], holder: PeerAddress
) -> list[_Item]:
    """Returns those of a load's items that belong to objects that one process lends.

    Args:
        items: one for each of some consecutive objects of the load.
        first: number of the first of these objects among those of the load.
        holders: the processes that lend the objects of a block, which are as many as these.
        holder: one of these processes.
    """
    are_held = [holders[(first + index) % len(holders)] == holder for index in range(len(holders))]
    return list(compress(items, cycle(are_held)))


def _with_slices(rank: SavedSlices) -> KvPeerParams:
    message = KvPeerParams.FromString(rank.params)
    message.slices.extend(rank.slices)
    return message


def _address_from_proto(message: KvPeerParams) -> PeerAddress:
    if not message.endpoint or not message.generation:
        raise ValueError("the handoff's connector_params name no peer")
    return PeerAddress(message.endpoint, message.generation)


def _find_holder(number: int, lenders: Sequence[tuple[PeerAddress, Sequence[int]]]) -> PeerAddress:
    for address, slices in lenders:
        if not slices or number in slices:
            return address
    raise ValueError(f"the handoff's connector_params name no peer for slice {number} of a block")
