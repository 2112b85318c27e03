"""Schemes of quantized checkpoints, as config.json states them."""

import pytest

from baton.common.errors import ConfigurationError
from engine.models.quantization import Scheme, SchemeKind, quantization_scheme

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def _compressed(form="pack-quantized", group=None, weights=None, **fields):
    args = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128, **(weights or {})}
    groups = {"group_0": {"targets": ["Linear"], "weights": args, **(group or {})}}
    method = {"quant_method": "compressed-tensors", "format": form}
    return method | {"config_groups": groups} | fields


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (None, None),
        (_GPTQ, Scheme(SchemeKind.GPTQ, bits=4, group=128, zero_offset=1)),
        (
            {**_GPTQ, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2", "bits": 8},
            Scheme(SchemeKind.GPTQ, bits=8, group=128, is_symmetric=False),
        ),
        (
            {**_GPTQ, "group_size": -1, "dynamic": {"+:.*down.*": {"bits": 8}, "-:.*gate": {}}},
            Scheme(SchemeKind.GPTQ, bits=4, zero_offset=1),
        ),
        (
            {**_GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
            Scheme(SchemeKind.GPTQ, bits=4, group=128, zero_offset=1),
        ),
        (_AWQ, Scheme(SchemeKind.AWQ, bits=4, group=64, is_symmetric=False)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 128},
            Scheme(SchemeKind.AWQ, bits=4, group=128, is_symmetric=False),
        ),
        (_FP8, Scheme(SchemeKind.FP8)),
        (
            {**_FP8, "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
            Scheme(SchemeKind.FP8),
        ),
        (
            {**_FP8, "activation_scheme": "static"},
            Scheme(SchemeKind.FP8, unused=("activation_scheme",)),
        ),
        ({"quant_method": "fbgemm_fp8"}, Scheme(SchemeKind.FP8)),
        ({"quant_method": "mxfp4"}, Scheme(SchemeKind.MXFP4, bits=4)),
        (
            _compressed(sparsity_config={}, kv_cache_scheme=None),
            Scheme(SchemeKind.COMPRESSED),
        ),
        (
            _compressed(
                "int-quantized",
                {"input_activations": {"dynamic": False}},
                {"num_bits": 8, "strategy": "channel"},
                kv_cache_scheme={"num_bits": 8},
                sparsity_config={"format": "dense"},
            ),
            Scheme(
                SchemeKind.COMPRESSED,
                unused=("kv_cache_scheme", "config_groups.group_0.input_activations"),
            ),
        ),
        (
            _compressed(
                "mixed-precision",
                {"format": "float-quantized"},
                {
                    "type": "float",
                    "num_bits": 8,
                    "strategy": "block",
                    "block_structure": [128, 128],
                },
            ),
            Scheme(SchemeKind.COMPRESSED),
        ),
        (
            _compressed(weights={"actorder": "group"}),
            Scheme(SchemeKind.COMPRESSED, has_column_order=True),
        ),
        (_compressed(group={"weights": None}), Scheme(SchemeKind.COMPRESSED)),
    ],
)
def test_schemes_of_published_checkpoints(stated, expected):
    assert quantization_scheme(stated) == expected


_BLOCKS = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [64, 64]}


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        *(
            (
                {"quant_method": method},
                f"quant_method {method!r} is not supported; it must be one of",
            )
            for method in (
                *("bitsandbytes", "aqlm", "hqq", "eetq", "quip", "vptq", "spqr", "quark"),
                *("torchao", "higgs", "fp_quant", "modelopt", None),
            )
        ),
        ([], "quantization_config is []; it must be an object"),
        ({**_GPTQ, "bits": 3}, "bits 3 is not supported; it must be 4 or 8"),
        ({**_GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ({**_GPTQ, "is_marlin_format": True}, "is_marlin_format True is not supported"),
        ({**_GPTQ, "pack_dtype": "int64"}, "pack_dtype 'int64' is not supported"),
        ({**_GPTQ, "desc_act": "no"}, "desc_act is 'no'; it must be true or false"),
        ({**_GPTQ, "group_size": 0}, "group_size is 0; it must be a positive integer, or -1"),
        ({**_GPTQ, "dynamic": {"x": {"bits": 2}}}, "dynamic 'x' bits 2 is not supported"),
        ({**_GPTQ, "dynamic": {"x": {"sym": False}}, "sym": True}, "dynamic 'x' sym False is not"),
        ({**_GPTQ, "bits": 4.0}, "bits 4.0 is not supported; it must be 4 or 8"),
        (
            {**_GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
            "packing_format 'auto_round:auto_awq' is not supported",
        ),
        ({**_AWQ, "bits": 8}, "bits 8 is not supported; it must be 4"),
        ({**_AWQ, "bits": 4.0}, "bits 4.0 is not supported; it must be 4"),
        ({**_AWQ, "version": "gemv"}, "version 'gemv' is not supported; it must be gemm"),
        ({**_AWQ, "zero_point": False}, "zero_point False is not supported"),
        ({**_FP8, "weight_block_size": [64, 64]}, "weight_block_size [64, 64] is not supported"),
        ({**_FP8, "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        (_compressed(config_groups={}), "config_groups {} is not supported"),
        (
            _compressed("nvfp4-pack-quantized"),
            "config_groups.group_0.format 'nvfp4-pack-quantized'",
        ),
        (_compressed("marlin-24"), "group_0.format 'marlin-24' is not supported"),
        (_compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
        (_compressed(transform_config={"config_groups": {"x": 1}}), "transform_config {"),
        (_compressed(weights={"num_bits": 4.0}), "weights.num_bits 4.0 is not supported"),
        (_compressed(weights={"num_bits": 6}), "group_0.weights.num_bits 6 is not supported"),
        (
            _compressed("int-quantized"),
            "num_bits 4 is not supported; it must be 8 with int-quantized",
        ),
        (_compressed(weights={"type": "float"}), "weights.type 'float' is not supported"),
        (_compressed("float-quantized", weights=_BLOCKS), "block_structure [64, 64] is not"),
        (_compressed(weights={"strategy": "tensor_group"}), "strategy 'tensor_group' is not"),
    ],
)
def test_other_values_are_refused_by_their_field(stated, problem):
    with pytest.raises(ConfigurationError) as failure:
        quantization_scheme(stated)
    assert "config.json: quantization_config" in failure.value.message
    assert problem in failure.value.message
