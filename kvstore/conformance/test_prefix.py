"""`contains_prefix`: how many leading keys exist."""

import pytest

from kvstore.conformance.objects import filled, random_keys
from kvstore.store import KvStore


@pytest.mark.parametrize("num_present", [0, 1, 4, 9])
def test_counts_the_leading_keys(store: KvStore, num_present: int) -> None:
    keys = random_keys(9)
    store.put(keys[:num_present], [filled(1, 10)] * num_present)
    assert store.contains_prefix(keys) == num_present


@pytest.mark.parametrize("hole", [0, 1, 7, 8])
def test_stops_at_the_first_hole(store: KvStore, hole: int) -> None:
    keys = random_keys(9)
    present = keys[:hole] + keys[hole + 1 :]
    store.put(present, [filled(1, 10)] * 8)
    assert store.contains_prefix(keys) == hole


def test_no_keys_have_no_prefix(store: KvStore) -> None:
    assert store.contains_prefix([]) == 0


def test_sees_a_deletion(store: KvStore) -> None:
    keys = random_keys(3)
    store.put(keys, [filled(1, 10)] * 3)
    store.delete([keys[1]])
    assert store.contains_prefix(keys) == 1
