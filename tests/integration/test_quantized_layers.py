"""The weights of quantized layers, read from files as the tools write them."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from baton.common.errors import ConfigurationError
from engine.models.quantization import quantization_scheme
from engine.models.tensor_parts import as_numbers
from engine.runtime.weights.quantized.files import QuantizedFiles
from engine.runtime.weights.stored_tensors import read_headers
from kernels.block_rows import BlockRows
from kernels.formats import FORMATS
from tests.support.kernel_checks import normal
from tests.support.quantized_layers import KINDS

_WEIGHT = "layers.0.q_proj.weight"


def _write(kind, folder, rows=40, columns=96, files=1, **others):
    """Writes a layer; returns its files, and the weight."""
    layer = kind.quantize(normal(rows, columns, seed=rows) * 0.1)
    stored = {f"layers.0.q_proj.{name}": tensor for name, tensor in layer.tensors.items()} | others
    names = sorted(stored, reverse=True)
    paths = [folder / f"{number}.safetensors" for number in range(files)]
    for number, path in enumerate(paths):
        save_file({name: stored[name].contiguous() for name in names[number::files]}, path)
    return paths, layer.weight


def _open(kind, paths):
    return QuantizedFiles(paths, quantization_scheme(kind.config))


def _weights(files, paths):
    """Returns the layers' weights in all files, by name."""
    found = {}
    for path in paths:
        with files.open(path) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                found[name] = tensors.get_slice(name)[:, :]
    return found


def _numbers(files, paths):
    return as_numbers(_weights(files, paths)[_WEIGHT])


@pytest.mark.parametrize(
    ("form", "shape", "kept_in"),
    [
        *((form, (40, 96), kind.format) for form, kind in KINDS.items()),
        ("fp8 blocks", (200, 256), "FP8_128"),
        ("fp8 blocks", (200, 192), None),
        ("w4a16 channels", (24, 128), "INT4_128"),
    ],
)
def test_a_layer_has_the_weight_that_its_library_makes_of_it(form, shape, kept_in, tmp_path):
    paths, weight = _write(KINDS[form], tmp_path, *shape)
    files = _open(KINDS[form], paths)
    (entry,) = read_headers(paths, files.open)
    assert (entry.name, entry.shape) == (_WEIGHT, shape)
    assert entry.format == (kept_in and FORMATS[kept_in])
    found = _weights(files, paths)[_WEIGHT]
    assert isinstance(found, BlockRows) == bool(kept_in)
    # compressed-tensors compute in the type of the scales, and Baton in float32.
    assert torch.equal(as_numbers(found).to(weight.dtype), weight)


def test_what_is_dequantized_or_has_no_effect_is_logged(tmp_path, caplog):
    caplog.set_level("INFO", "baton.engine")
    for form in ("gptq in another order", "fp8 tensors", "gptq"):
        folder = tmp_path / form
        folder.mkdir()
        _open(KINDS[form], _write(KINDS[form], folder)[0])
    unused, dense = (record.getMessage() for record in reversed(caplog.records))
    assert dense.startswith(f"1 weights are dequantized (first: {_WEIGHT}): no storage format")
    assert unused == "quantization_config: activation_scheme: no effect"


@pytest.mark.parametrize("form", KINDS)
def test_each_range_of_rows_can_be_read(form, tmp_path):
    """Zero points of eight rows may share a word, so that some ranges have only one."""
    paths, weight = _write(KINDS[form], tmp_path, rows=24)
    with _open(KINDS[form], paths).open(paths[0]) as tensors:
        stored = tensors.get_slice(_WEIGHT)
        for start, stop in combinations(range(25), 2):
            rows = as_numbers(stored[slice(start, stop), slice(0, 96)])
            assert torch.equal(rows.to(weight.dtype), weight[start:stop]), (start, stop)


def test_columns_have_the_order_of_their_groups_without_desc_act(tmp_path):
    kind = KINDS["gptq in another order"]
    kind = replace(kind, config=kind.config | {"desc_act": False})
    paths, weight = _write(kind, tmp_path)
    assert torch.equal(_numbers(_open(kind, paths), paths), weight)


@pytest.mark.parametrize("form", ["gptq with zero points", "awq", "w4a16 channels", "fp8 blocks"])
def test_parts_of_a_layer_in_several_files_are_those_of_its_weight(form, tmp_path):
    kind = KINDS[form]
    bias = {"layers.0.q_proj.bias": normal(200), "layers.0.q_proj.input_scale": normal(1)}
    paths, weight = _write(kind, tmp_path, rows=200, columns=384, files=3, **bias)
    files = _open(kind, paths)
    names = []
    for path in paths:
        with files.open(path) as tensors:
            names += tensors.keys()
            if _WEIGHT not in tensors.keys():  # noqa: SIM118 - not a dict
                continue
            stored = tensors.get_slice(_WEIGHT)
            for rows, columns in (((3, 17), (0, 384)), ((126, 200), (128, 384)), ((8, 9), (5, 6))):
                index = slice(*rows), slice(*columns)
                assert torch.equal(as_numbers(stored[index]), weight.float()[index])
    assert sorted(names) == ["layers.0.q_proj.bias", _WEIGHT]


def test_blocks_of_floats_have_the_weight_that_transformers_makes_of_them(tmp_path):
    kind = KINDS["fp8 blocks"]
    paths, _ = _write(kind, tmp_path, rows=256, columns=384)
    layer = {name.split(".")[-1]: tensor for name, tensor in load_file(paths[0]).items()}
    expected = Fp8Dequantize(None)._dequantize_one(layer["weight"], layer["weight_scale_inv"])
    assert torch.equal(_numbers(_open(kind, paths), paths), expected)


def test_powers_of_two_may_be_scales_of_blocks(tmp_path):
    kind = KINDS["fp8 blocks"]
    layer = kind.quantize(normal(130, 256))
    scales = torch.tensor([[0.25, 2.0], [8.0, 1.0]])
    layer.tensors["weight_scale_inv"] = scales.to(torch.float8_e8m0fnu)
    save_file(
        {f"layers.0.q_proj.{name}": tensor for name, tensor in layer.tensors.items()},
        tmp_path / "a",
    )
    found = _numbers(_open(kind, [tmp_path / "a"]), [tmp_path / "a"])
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130]
    assert torch.equal(found, layer.tensors["weight"].float() * wide)


def _without(name):
    return lambda tensors: tensors.pop(name)


def _cut(name):
    """Leaves out the last part of a tensor's first axis."""
    return lambda tensors: tensors.update({name: tensors[name][:-1]})


def _as(name, dtype):
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def _fill(name, value):
    return lambda tensors: tensors[name].view(torch.uint8).fill_(value)


@pytest.mark.parametrize(
    ("form", "change", "problem"),
    [
        ("gptq", _without("scales"), "lacks tensor layers.0.q_proj.scales"),
        (
            "gptq",
            _cut("scales"),
            r"q_proj.scales is F16 \[2, 40\]; the layer has 40 outputs and 96",
        ),
        ("gptq", _cut("qweight"), r"q_proj.qweight is I32 \[11, 40\]; it must have 4 or 8 bits"),
        ("gptq in another order", _fill("g_idx", 9), "it must have the groups 0 to 2 of inputs"),
        ("awq", _without("qzeros"), "lacks tensor layers.0.q_proj.qzeros"),
        ("awq", _cut("qzeros"), r"q_proj.qzeros is I32 \[2, 5\]; the layer needs \[3, 5\]"),
        ("w4a16 groups", _without("weight_shape"), "lacks tensor layers.0.q_proj.weight_shape"),
        ("w4a16 groups", _cut("weight_packed"), "a weight of 40 x 96 integers of 4 or 8 bits"),
        (
            "w4a16 groups",
            _cut("weight_scale"),
            r"F32 \[39, 3\]; it does not fit a weight of 40 x 96",
        ),
        ("fp8 blocks", _without("weight_scale_inv"), "lacks tensor layers.0.q_proj.weight_scale"),
        ("fp8 tensors", _fill("weight", 0xFF), "it has values that are NaN"),
        (
            "w8a16 groups with zero points",
            _cut("weight_zero_point"),
            r"point is I32 \[9, 3\]; the layer's scales have another shape",
        ),
        (
            *(
                "w4a16 groups",
                lambda tensors: tensors.update(weight_shape=torch.tensor([40, 96, 1])),
            ),
            r"weight_shape is I64 \[3\]; it must have the numbers of outputs and inputs",
        ),
        (
            *("fp8 blocks", _as("weight_scale_inv", torch.uint8)),
            "weight_scale_inv is U8 .* it must be F32 or BF16 or F16 or F8_E8M0",
        ),
        ("awq", _as("qzeros", torch.int64), r"q_proj.qzeros is I64 \[3, 5\]; it must be I32"),
    ],
)
def test_layers_whose_tensors_do_not_fit_are_refused_by_name(form, change, problem, tmp_path):
    kind = KINDS[form]
    layer = kind.quantize(normal(40, 96))
    change(layer.tensors)
    path = tmp_path / "model.safetensors"
    stored = {f"layers.0.q_proj.{name}": value for name, value in layer.tensors.items()}
    save_file({name: value.contiguous() for name, value in stored.items()}, path)
    with pytest.raises(ConfigurationError, match=problem) as failure:
        _weights(_open(kind, [path]), [path])
    assert str(tmp_path) in failure.value.message
