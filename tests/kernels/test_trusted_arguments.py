"""The kernels refuse arguments with which the native library would access foreign memory."""

from dataclasses import replace

import pytest
import torch

import kernels
from kernels import Activation, QkNorms, Rotation, WeightUse
from tests.support.attention_cases import make_case
from tests.support.kernel_checks import filled_weight, native_only, normal

pytestmark = native_only("torch checks its arguments")

WEIGHT = filled_weight(normal(40, 8))
GATED = filled_weight(normal(40, 8), WeightUse.GATED_LINEAR)
HIDDEN = normal(3, 8)


@pytest.mark.parametrize(
    ("hidden", "bias", "residual", "out_dtype"),
    [
        (HIDDEN.bfloat16(), None, None, None),
        (HIDDEN[:, :7], None, None, None),
        (HIDDEN, None, None, torch.bfloat16),
        (HIDDEN, None, None, torch.float64),
        (HIDDEN, normal(39), None, None),
        (HIDDEN, normal(40).bfloat16(), None, None),
        (HIDDEN, normal(80)[::2], None, None),
        (HIDDEN, None, normal(2, 40), None),
        (HIDDEN, None, normal(3, 39), None),
        (HIDDEN, None, normal(3, 40).bfloat16(), None),
    ],
)
def test_linear_refuses_wrong_types_and_shapes(hidden, bias, residual, out_dtype):
    with pytest.raises(AssertionError):
        kernels.linear(hidden, WEIGHT, bias, residual, out_dtype=out_dtype)


def test_a_gated_layer_refuses_a_bias_for_half_of_it():
    with pytest.raises(AssertionError):
        kernels.linear_gated(HIDDEN, GATED, normal(20), Activation.SILU)


@pytest.mark.parametrize("token_ids", [torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2).long()])
def test_embed_and_take_rows_refuse_wrong_token_ids(token_ids):
    with pytest.raises(AssertionError):
        kernels.embed(token_ids, WEIGHT)
    with pytest.raises(AssertionError):
        kernels.take_rows(HIDDEN, token_ids)


@pytest.mark.parametrize("addend", [normal(2, 8), normal(3, 7), normal(3, 8).bfloat16()])
def test_embed_refuses_wrong_addends(addend):
    with pytest.raises(AssertionError):
        kernels.embed(torch.zeros(3).long(), WEIGHT, addend=addend)


@pytest.mark.parametrize("gates", [normal(2, 8), normal(3, 7), normal(3, 8).bfloat16()])
def test_gate_rows_refuses_wrong_gates(gates):
    with pytest.raises(AssertionError):
        kernels.gate_rows(HIDDEN, gates, Activation.SILU)


@pytest.mark.parametrize("weight", [normal(7), normal(8).bfloat16(), normal(16)[::2]])
def test_rms_norm_refuses_wrong_weights(weight):
    with pytest.raises(AssertionError):
        kernels.rms_norm(HIDDEN, weight, 1e-6)


@pytest.mark.parametrize("residual", [normal(3, 7), normal(2, 8), normal(3, 8).bfloat16()])
def test_rms_norm_refuses_wrong_residuals(residual):
    with pytest.raises(AssertionError):
        kernels.rms_norm(HIDDEN, normal(8), 1e-6, residual=residual)


def test_row_maxima_refuses_wrong_logits_and_outputs():
    with pytest.raises(AssertionError):
        kernels.row_maxima(HIDDEN.bfloat16())
    right = torch.ones(3), torch.ones(3).long()
    for wrong in (
        torch.ones(2),
        torch.ones(3).int(),
        torch.ones(6)[::2],
        torch.ones(6).long()[::2],
    ):
        for out in ((wrong, right[1]), (right[0], wrong)):
            with pytest.raises(AssertionError):
                kernels.row_maxima(HIDDEN, out)


@pytest.mark.parametrize(
    ("positions", "frequencies"),
    [(torch.zeros(3, dtype=torch.int32), torch.ones(4)), (torch.zeros(3).long(), normal(8)[::2])],
)
def test_rotary_angles_refuses_wrong_positions_and_frequencies(positions, frequencies):
    with pytest.raises(AssertionError):
        kernels.rotary_angles(positions, frequencies, 1.0)


@pytest.mark.parametrize("field", ["block_tables", "query_starts", "context_lens", "slot_mapping"])
def test_paged_attention_refuses_metadata_of_another_integer_type(field):
    case = make_case([(7, 1), (20, 1)], head_dim=8)
    other = torch.int32 if field == "slot_mapping" else torch.int64
    meta = replace(case.meta, **{field: getattr(case.meta, field).to(other)})
    with pytest.raises(AssertionError):
        kernels.paged_attention(normal(2, 6, 8), case.kv_layer, meta, scale=1.0)


def prepare(head_dim=8, query=None, rotation=None, norms=None):
    case = make_case([(7, 1), (20, 1)], head_dim=head_dim)
    query = normal(2, 6, head_dim) if query is None else query
    key = normal(2, 2, head_dim)
    return kernels.rotate_and_write_kv(
        query, key, key.clone(), case.kv_layer, case.meta, rotation=rotation, norms=norms
    )


@pytest.mark.parametrize(
    "angles",
    [torch.ones(2, 3), torch.ones(1, 4), torch.ones(2, 4).bfloat16(), torch.ones(4, 2).t()],
)
def test_rotations_of_wrong_types_and_shapes_are_refused(angles):
    right = torch.ones(2, 4)
    for rotation in (Rotation(angles, right), Rotation(right, angles)):
        with pytest.raises(AssertionError):
            prepare(rotation=rotation)


def test_rotation_of_more_elements_than_a_head_has_is_refused():
    with pytest.raises(AssertionError):
        prepare(head_dim=7, rotation=Rotation(torch.ones(2, 4), torch.ones(2, 4)))


@pytest.mark.parametrize("weight", [normal(7), normal(8).bfloat16()])
def test_head_norms_of_wrong_types_and_shapes_are_refused(weight):
    for norms in (QkNorms(weight, normal(8), 1e-6), QkNorms(normal(8), weight, 1e-6)):
        with pytest.raises(AssertionError):
            prepare(norms=norms)


@pytest.mark.parametrize("query", [normal(3, 6, 8), normal(2, 6, 6), normal(2, 5, 8)])
def test_queries_of_another_shape_are_refused(query):
    with pytest.raises(AssertionError):
        prepare(query=query)
