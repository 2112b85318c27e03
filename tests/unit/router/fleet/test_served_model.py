"""What replicas of a cluster must share, and the warning while their stores differ."""

import logging
from dataclasses import dataclass, replace

import pytest

from baton.common.errors import FailedPreconditionError
from baton.v1 import worker_pb2
from router.fleet.served_model import ServedModel, StoreAgreement, check_tokenizer

MODEL = ServedModel(
    model="m",
    kv_dtype="bfloat16",
    model_fingerprint="0123456789abcdef",
    layout_version=1,
    block_size=16,
    vocab_size=100,
    eos_token_ids=(2,),
    kv_connector="redis",
    kv_form="model 0123, bfloat16",
    namespace=b"\x01",
)


def test_equal_models_do_not_differ():
    assert MODEL.differences(replace(MODEL)) == ""


def test_fields_that_determine_the_namespace_are_named_instead_of_it():
    other = replace(MODEL, kv_dtype="float16", block_size=32, kv_form="f", namespace=b"\x02")
    assert MODEL.differences(other) == (
        "kv_dtype is 'float16', the cluster's is 'bfloat16'; block_size is 32, the cluster's is 16"
    )


def test_a_difference_of_the_kv_form_without_its_own_field_is_described():
    other = replace(MODEL, kv_form="model 0123, bfloat16, 2 head slices", namespace=b"\x02")
    assert MODEL.differences(other) == (
        "kv_form is 'model 0123, bfloat16, 2 head slices', the cluster's is 'model 0123, bfloat16'"
    )


def test_other_words_for_the_same_namespace_are_no_difference():
    assert MODEL.differences(replace(MODEL, kv_form="model 0123, bfloat16, keys 1")) == ""


def test_a_different_namespace_is_named_if_nothing_else_differs():
    other = replace(MODEL, namespace=b"\x02")
    assert MODEL.differences(other) == "namespace is 02, the cluster's is 01"


@pytest.mark.parametrize("field", ["model_fingerprint", "layout_version", "kv_connector"])
def test_other_different_fields_are_named(field):
    assert MODEL.differences(replace(MODEL, **{field: 7})).startswith(f"{field} is 7, ")


def test_a_worker_with_another_tokenizer_is_refused_with_both_digests():
    with pytest.raises(FailedPreconditionError, match=r"is aaaa, this router's is bbbb; start"):
        check_tokenizer(worker_pb2.GetInfoResponse(tokenizer_digest="aaaa"), "bbbb")


@pytest.mark.parametrize(("workers", "routers"), [("aaaa", "aaaa"), ("", "bbbb"), ("aaaa", "")])
def test_an_equal_or_missing_tokenizer_is_no_reason_to_refuse(workers, routers):
    check_tokenizer(worker_pb2.GetInfoResponse(tokenizer_digest=workers), routers)


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
def test_a_warning_names_workers_without_a_common_store(prefill, decode, is_apart) -> None:
    agreement = StoreAgreement("tiny")
    agreement.check([FakeReplica("p", prefill)], [FakeReplica("d", decode)])
    assert bool(agreement.warning) == is_apart
    if is_apart:
        assert "p:7001" in agreement.warning
        assert "d:7001" in agreement.warning


def test_a_worker_of_both_tiers_shares_its_store_with_itself() -> None:
    agreement = StoreAgreement("tiny")
    agreement.check([FakeReplica("p", ("a",))], [FakeReplica("p", ("b",))])
    assert not agreement.warning


def test_different_stores_are_logged_once_until_they_agree(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "baton.router")
    agreement, prefill = StoreAgreement("tiny"), FakeReplica("p", ("a",))
    for _ in range(3):
        agreement.check([prefill], [FakeReplica("d", ("b",)), FakeReplica("e", ("b",))])
    agreement.check([prefill], [FakeReplica("d", ("a",))])
    agreement.check([prefill], [])
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
