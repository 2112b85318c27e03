"""What replicas of a cluster must agree on, and how a difference is told."""

from dataclasses import replace

import pytest

from router.served_model import ServedModel

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


def test_what_the_namespace_is_made_of_is_named_in_its_place():
    other = replace(MODEL, kv_dtype="float16", block_size=32, kv_form="f", namespace=b"\x02")
    assert MODEL.differences(other) == (
        "kv_dtype is 'float16', the cluster's is 'bfloat16'; block_size is 32, the cluster's is 16"
    )


def test_a_form_that_differs_in_what_has_no_field_is_named_in_words():
    other = replace(MODEL, kv_form="model 0123, bfloat16, 2 head slices", namespace=b"\x02")
    assert MODEL.differences(other) == (
        "kv_form is 'model 0123, bfloat16, 2 head slices', the cluster's is 'model 0123, bfloat16'"
    )


def test_a_namespace_that_differs_alone_is_named():
    other = replace(MODEL, namespace=b"\x02")
    assert MODEL.differences(other) == "namespace is 02, the cluster's is 01"


@pytest.mark.parametrize("field", ["model_fingerprint", "layout_version", "kv_connector"])
def test_any_other_field_is_named(field):
    assert MODEL.differences(replace(MODEL, **{field: 7})).startswith(f"{field} is 7, ")
