"""The parts of checkpoint tensors: joined layers, ordered rows, names of families."""

import pytest
import torch

import kernels
from engine.models.expert_storage import ExpertStorage, expert_matrices
from engine.models.layers import checkpoint_tensors
from engine.models.linear import FusedLinear, GatedLinear
from engine.models.tensor_parts import (
    OneOfStack,
    OrderedRows,
    TensorPart,
    TransposedRows,
    fill,
    half_split_order,
    renamed_parts,
)
from engine.runtime.weights.loader import allocate_modules
from kernels import Activation, Cut
from kernels.formats import FORMATS

WIDTH = 5
HEAD = 4


def filled(module, path, stored):
    """Fills a module from tensors by name, and returns the matrix and the bias it computes with."""
    allocate_modules(module, torch.float32, torch.device("cpu"))
    for part in module.checkpoint_tensors(path):
        assert part.tensor_shape == tuple(stored[part.name].shape)
        assert tuple(part.target.shape) == tuple(cut.size for cut in part.cuts)
        part.target.copy_(stored[part.name][part.index])
    columns = module(torch.cat((torch.zeros(1, WIDTH), torch.eye(WIDTH))))
    return (columns[1:] - columns[0]).T, columns[0]


def test_pieces_have_so_many_elements_of_whole_rows():
    """A file's reader may have to read all columns of a row, of which a rank has a quarter."""
    part = TensorPart("a", torch.empty(10, 8), (Cut.whole(10), Cut(32, 8, 16)))
    assert [piece.target.shape[0] for piece in part.pieces(96)] == [3, 3, 3, 1]


def qkv_parts(rank, num_ranks):
    """Six heads of queries and three of keys and values, divided among ranks."""
    share = Cut(num_ranks, rank, rank + 1)
    query, kv = share.times(6 // num_ranks * HEAD), share.times(3 // num_ranks * HEAD)
    return {"q_proj": query, "k_proj": kv, "v_proj": kv}


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (0, 3), (2, 3)])
def test_a_joined_tensor_fills_the_same_rows_as_separate_ones(rank, num_ranks):
    parts = qkv_parts(rank, num_ranks)
    apart = {
        f"attn.{name}.{kind}": torch.randn(cut.total, *shape)
        for name, cut in parts.items()
        for kind, shape in (("weight", (WIDTH,)), ("bias", ()))
    }
    joined = {
        f"attn.qkv_proj.{kind}": torch.cat([apart[f"attn.{name}.{kind}"] for name in parts])
        for kind in ("weight", "bias")
    }
    expected = filled(FusedLinear(WIDTH, parts, bias=True), "attn.qkv_proj", apart)
    found = filled(FusedLinear(WIDTH, parts, bias=True, is_joined=True), "attn.qkv_proj", joined)
    assert all(map(torch.equal, found, expected))
    matrix = torch.cat([apart[f"attn.{name}.weight"][cut.slice] for name, cut in parts.items()])
    torch.testing.assert_close(found[0], matrix, atol=1e-6, rtol=0)


@pytest.mark.parametrize("cut", [Cut.whole(6), Cut(6, 2, 5)])
def test_a_joined_gated_layer_has_the_gates_rows_first(cut):
    gate, up = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    module = GatedLinear(WIDTH, cut, Activation.SILU, bias=False, is_joined=True)
    allocate_modules(module, torch.float32, torch.device("cpu"))
    stored = torch.cat((gate, up))
    for part in module.checkpoint_tensors("mlp.gate_up_proj"):
        assert part.name == "mlp.gate_up_proj.weight"
        part.target.copy_(stored[part.index])
    hidden = torch.randn(3, WIDTH)
    gated = torch.nn.functional.silu(hidden @ gate[cut.slice].T) * (hidden @ up[cut.slice].T)
    torch.testing.assert_close(module(hidden), gated, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_joined", [False, True])
def test_rows_of_some_layers_get_another_order(is_joined):
    parts = qkv_parts(1, 3)
    orders = dict.fromkeys(("q_proj", "k_proj"), half_split_order(HEAD, HEAD))
    module = FusedLinear(WIDTH, parts, bias=True, is_joined=is_joined, row_orders=orders)
    layers = {name: torch.randn(cut.total, WIDTH) for name, cut in parts.items()}
    kinds = {name: {"weight": rows, "bias": rows[:, 0]} for name, rows in layers.items()}
    stored = {
        f"attn.{name}.{kind}": rows for name in parts for kind, rows in kinds[name].items()
    } | {
        f"attn.qkv.{kind}": torch.cat([kinds[name][kind] for name in parts])
        for kind in ("weight", "bias")
    }
    matrix, bias = filled(module, "attn.qkv", stored)
    rows = [layers[name][cut.slice] for name, cut in parts.items()]
    expected = torch.cat([rows[0][[0, 2, 1, 3, 4, 6, 5, 7]], rows[1][[0, 2, 1, 3]], rows[2]])
    torch.testing.assert_close(matrix, expected, atol=1e-6, rtol=0)
    assert torch.equal(bias, expected[:, 0])


def test_only_the_rotary_elements_of_a_head_get_another_order():
    assert half_split_order(8, 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 7]
    target = torch.empty(2, 3)
    OrderedRows(target, torch.tensor([1, 0])).copy_(torch.arange(6.0).view(3, 2).T)
    assert target.tolist() == [[1, 3, 5], [0, 2, 4]]


def test_names_are_replaced_by_whole_components_and_once():
    names = {"post_norm": "second_norm", "norm": "post_norm", "attn.out": "attention.o", "out": "w"}
    parts = [
        TensorPart.whole(f"model.layers.0.{name}.weight", torch.empty(1))
        for name in ("norm", "post_norm", "attn.out", "mlp.out", "layernorm", "norm_out")
    ]
    renamed = [part.name.split(".", 3)[3] for part in renamed_parts(parts, names)]
    expected = ["post_norm", "second_norm", "attention.o", "mlp.w", "layernorm", "norm_out"]
    assert renamed == [f"{name}.weight" for name in expected]


def test_a_models_names_apply_to_all_of_its_tensors():
    module = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(3), "lm_head": torch.nn.LayerNorm(2)})
    tensors = checkpoint_tensors(module, "model.", {"norm": "final_norm", "lm_head": "embed_out"})
    kinds = ("weight", "bias")
    expected = [f"{name}.{kind}" for name in ("model.final_norm", "embed_out") for kind in kinds]
    assert list(tensors) == expected


def rows_in_turn(gate, up):
    targets = {"gate_proj": gate, "up_proj": up}
    (part,) = expert_matrices(ExpertStorage.INTERLEAVED, "", Cut.whole(1), 0, targets)
    return part.target


@pytest.mark.parametrize(
    "make_target",
    [
        lambda memory: memory,
        lambda memory: OrderedRows(memory, half_split_order(4, 4)),
        OneOfStack,
        lambda memory: OneOfStack(OrderedRows(memory, half_split_order(4, 2))),
        lambda memory: TransposedRows(memory.view(32, 8)),
        lambda memory: rows_in_turn(memory[:4].view(16, 8), memory[4:].view(16, 8)),
    ],
)
def test_targets_take_blocks_as_they_take_their_numbers(make_target):
    """Each has 8 rows of 32 columns, also those that store them in another order."""
    blocks = kernels.quantize_rows(torch.randn(8, 32), FORMATS["INT4_32"])
    numbers = kernels.dequantize(blocks, torch.float32)
    memory = torch.zeros(2, 8, 32)
    fill(make_target(memory[0]), blocks)
    target = make_target(memory[1])
    fill(target, numbers.view(target.shape))
    assert torch.equal(memory[0], memory[1])
    assert memory[0].count_nonzero() == numbers.count_nonzero()
