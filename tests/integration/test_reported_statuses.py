"""Loads from a backend that returns more statuses than were requested, or fewer."""

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
ChangeStatuses = Callable[[list[GetStatus]], list[GetStatus]]


class StatusChangingBackend:
    """Wraps a backend and changes the statuses that `fetch` returns."""

    def __init__(self, inner: Backend, change: ChangeStatuses) -> None:
        self._inner, self._change = inner, change

    def num_held(self, keys: Sequence[bytes]) -> int:
        return self._inner.num_held(keys)

    def put(self, job: SaveJob, keys: Sequence[bytes], slots: Sequence[KvObject]) -> None:
        self._inner.put(job, keys, slots)

    def fetch(
        self, job: LoadJob, keys: Sequence[bytes], objects: Sequence[KvObject]
    ) -> list[GetStatus]:
        return self._change(list(self._inner.fetch(job, keys, objects)))

    def discard(self, key: bytes) -> None:
        self._inner.discard(key)


@pytest.fixture(params=[copier_for, StagedCopier], ids=["in place", "staged"])
def rig(request, tmp_path) -> Iterator[ConnectorRig]:
    rig = ConnectorRig(open_store(f"memory://{tmp_path.name}"), request.param)
    yield rig
    rig.worker.close()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda statuses: statuses[:-2], LoadResult(1, 4, "missing")),
        (lambda statuses: [], LoadResult(1, 0, "missing")),
        (lambda statuses: [*statuses, HIT, HIT], LoadResult(1, 6)),
        (lambda statuses: [*statuses, GetStatus.MISSING], LoadResult(1, 6)),
    ],
    ids=["too few", "none", "too many", "extra missing"],
)
def test_blocks_without_a_status_are_missing_and_extra_statuses_ignored(
    rig: ConnectorRig, change: ChangeStatuses, expected: LoadResult
) -> None:
    rig.worker.wrap_backend(lambda inner: StatusChangingBackend(inner, change))
    rig.save(range(6))
    before = rig.pool.clone()
    assert rig.load(range(10, 16)) == expected
    num_good = expected.num_blocks
    assert torch.equal(rig.pool[10 : 10 + num_good], before[:num_good])
    for block, old in zip(rig.pool[10 + num_good : 16], before[10 + num_good :], strict=False):
        assert torch.equal(block, old) or not block.any()


def test_extra_hits_do_not_hide_a_corrupt_block(rig: ConnectorRig) -> None:
    rig.worker.wrap_backend(
        lambda inner: StatusChangingBackend(inner, lambda statuses: 2 * statuses)
    )
    rig.save(range(6))
    rig.store.delete(keys(1, 3))
    rig.store.put(keys(1, 3), [filled(0xFF, 10_000)])
    assert rig.load(range(10, 16)) == LoadResult(1, 3, "corrupt")
