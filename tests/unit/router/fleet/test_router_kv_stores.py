"""`StoreAgreement`: one warning while prefill and decode meet in no store."""

import logging
from dataclasses import dataclass

import pytest

from baton.v1 import worker_pb2
from router.fleet.kv_stores import StoreAgreement


@dataclass
class FakeReplica:
    replica_id: str
    ids: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        return f"{self.replica_id}:7001"

    @property
    def load(self) -> worker_pb2.WorkerLoad:
        return worker_pb2.WorkerLoad(kv_store_ids=self.ids)


@pytest.mark.parametrize(
    ("prefill", "decode", "is_apart"),
    [
        (("a",), ("a",), False),
        (("a",), ("b",), True),
        (("a", "b"), ("c", "b"), False),
        (("a", "b"), ("c", "d"), True),
        ((), ("b",), False),
        (("a",), (), False),
    ],
)
def test_workers_that_have_no_store_in_common(prefill, decode, is_apart) -> None:
    agreement = StoreAgreement("tiny")
    agreement.check([FakeReplica("p", prefill)], [FakeReplica("d", decode)])
    assert bool(agreement.warning) == is_apart
    if is_apart:
        assert "p:7001" in agreement.warning
        assert "d:7001" in agreement.warning


def test_a_worker_of_both_tiers_meets_itself() -> None:
    agreement = StoreAgreement("tiny")
    agreement.check([FakeReplica("p", ("a",))], [FakeReplica("p", ("b",))])
    assert not agreement.warning


def test_it_is_logged_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.router")
    agreement, prefill = StoreAgreement("tiny"), FakeReplica("p", ("a",))
    for _ in range(3):
        agreement.check([prefill], [FakeReplica("d", ("b",)), FakeReplica("e", ("b",))])
    agreement.check([prefill], [FakeReplica("d", ("a",))])
    agreement.check([prefill], [])
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
