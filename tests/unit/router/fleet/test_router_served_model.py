"""`ServedModel.differences`: properties that replicas of a cluster must share."""

from dataclasses import replace

import pytest

from baton.common.errors import FailedPreconditionError
from baton.v1 import worker_pb2
from router.fleet.served_model import ServedModel, check_tokenizer

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
