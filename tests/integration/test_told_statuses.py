"""Loads from a backend that returns more statuses than were asked for, or fewer."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from kvstore.conformance.objects import filled
from kvstore.jobs import LoadJob, LoadResult, SaveJob
from kvstore.mover.backend import Backend
from kvstore.mover.mover import copier_for
from kvstore.registry import open_store
from kvstore.store import GetStatus, KvObject
from tests.support.connector_rig import ConnectorRig, keys
from tests.support.held_copier import StagedCopier

HIT = GetStatus.HIT
Tell = Callable[[list[GetStatus]], list[GetStatus]]


class TellingBackend:
    """Wraps a backend and changes the statuses that `fetch` returns."""

    def __init__(self, inner: Backend, tell: Tell) -> None:
        self._inner, self._tell = inner, tell

    def num_held(self, keys: Sequence[bytes]) -> int:
        return self._inner.num_held(keys)

    def put(self, job: SaveJob, keys: Sequence[bytes], slots: Sequence[KvObject]) -> None:
        self._inner.put(job, keys, slots)

    def fetch(
        self, job: LoadJob, keys: Sequence[bytes], objects: Sequence[KvObject]
    ) -> list[GetStatus]:
        return self._tell(list(self._inner.fetch(job, keys, objects)))

    def discard(self, key: bytes) -> None:
        self._inner.discard(key)


@pytest.fixture(params=[copier_for, StagedCopier], ids=["in place", "staged"])
def rig(request, tmp_path) -> Iterator[ConnectorRig]:
    rig = ConnectorRig(open_store(f"memory://{tmp_path.name}"), request.param)
    yield rig
    rig.worker.close()


@pytest.mark.parametrize(
    ("tell", "expected"),
    [
        (lambda statuses: statuses[:-2], LoadResult(1, 4, "missing")),
        (lambda statuses: [], LoadResult(1, 0, "missing")),
        (lambda statuses: [*statuses, HIT, HIT], LoadResult(1, 6)),
        (lambda statuses: [*statuses, GetStatus.MISSING], LoadResult(1, 6)),
    ],
    ids=["too few", "none", "too many", "missing ones behind"],
)
def test_what_nothing_is_told_of_is_missing_and_the_rest_ignored(
    rig: ConnectorRig, tell: Tell, expected: LoadResult
) -> None:
    rig.worker.wrap_backend(lambda inner: TellingBackend(inner, tell))
    rig.save(range(6))
    before = rig.pool.clone()
    assert rig.load(range(10, 16)) == expected
    num_good = expected.num_blocks
    assert torch.equal(rig.pool[10 : 10 + num_good], before[:num_good])
    for block, old in zip(rig.pool[10 + num_good : 16], before[10 + num_good :], strict=False):
        assert torch.equal(block, old) or not block.any()


def test_hits_behind_a_corrupt_one_do_not_hide_it(rig: ConnectorRig) -> None:
    rig.worker.wrap_backend(lambda inner: TellingBackend(inner, lambda told: 2 * told))
    rig.save(range(6))
    rig.store.delete(keys(1, 3))
    rig.store.put(keys(1, 3), [filled(0xFF, 10_000)])
    assert rig.load(range(10, 16)) == LoadResult(1, 3, "corrupt")
