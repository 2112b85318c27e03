"""Cases of pointwise kernels, gated products, block copies and sampling."""

from collections.abc import Iterator
from functools import partial
from types import ModuleType

import torch

import kernels
from benchmarks.gpu.kernel_case import KernelCase, Prepared, normal
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.timing import Call
from benchmarks.kernels.attention import BLOCK_SIZE
from benchmarks.kernels.case import DecoderShape, Result, rows_in_words
from benchmarks.kernels.cost import Cost, product_cost
from kernels import DrawTable, WeightUse, reference
from kernels.reference.linear import silu_and_mul
from kernels.weights import DenseWeight
from kvstore.layout import DTYPE_BYTES

__all__ = ["block_cases", "pointwise_cases", "product_cases", "sampling_cases"]

_EPS = 1e-5
_SAMPLING = {"greedy": (0.0, 1.0), "top-p 0.9": (0.8, 0.9)}
"""Pairs of temperature and top-p."""


def pointwise_cases(shape: DecoderShape, plan: Plan) -> Iterator[KernelCase]:
    """Returns the cases of norms and of the gates of gated layers."""
    for num_rows in plan.rows:
        size = f"{rows_in_words(num_rows)} of {shape.width}"
        num_bytes = 2 * num_rows * shape.width * DTYPE_BYTES[plan.dtype]
        prepare = partial(_prepare_norm, shape, plan, num_rows)
        yield KernelCase("rms norm", size, Cost(num_bytes), shape.width, prepare)
    for num_rows in plan.rows:
        size = f"{rows_in_words(num_rows)} of {shape.num_gated}"
        num_bytes = 3 * num_rows * shape.num_gated * DTYPE_BYTES[plan.dtype]
        prepare = partial(_prepare_gates, shape, plan, num_rows)
        yield KernelCase("silu and mul", size, Cost(num_bytes), 1, prepare)


def product_cases(shape: DecoderShape, plan: Plan) -> Iterator[KernelCase]:
    """Returns the cases of the gated layer, the largest product of a decoder's layer."""
    for num_rows in plan.rows:
        cost = product_cost(num_rows, 2 * shape.num_gated, shape.width, DTYPE_BYTES[plan.dtype])
        size = f"{rows_in_words(num_rows)} x {2 * shape.num_gated} x {shape.width}"
        prepare = partial(_prepare_product, shape, plan, num_rows)
        yield KernelCase("gated layer", size, cost, shape.width, prepare)


def block_cases(shape: DecoderShape, plan: Plan) -> Iterator[KernelCase]:
    """Returns the cases of copying blocks, scattered over a pool, from and to a buffer."""
    num_words = shape.num_layers * 2 * shape.num_kv_features * BLOCK_SIZE
    num_bytes = 2 * plan.num_moved_blocks * num_words * DTYPE_BYTES[plan.dtype]
    size = f"{plan.num_moved_blocks} blocks of {num_words * DTYPE_BYTES[plan.dtype] >> 10} KiB"
    for name in ("gather", "scatter"):
        prepare = partial(_prepare_blocks, name, plan, num_words)
        yield KernelCase(f"{name} blocks", size, Cost(num_bytes), 1, prepare)


def sampling_cases(shape: DecoderShape, plan: Plan) -> Iterator[KernelCase]:
    """Returns the cases of drawing tokens from logits, which read every logit once."""
    for name, (temperature, top_p) in _SAMPLING.items():
        for num_rows in plan.batch_sizes:
            size = f"{rows_in_words(num_rows)} of {shape.vocab_size}"
            cost = Cost(num_rows * shape.vocab_size * torch.float32.itemsize)
            prepare = partial(_prepare_sampling, shape, plan, num_rows, temperature, top_p)
            yield KernelCase(f"sample, {name}", size, cost, 1, prepare)


def _prepare_norm(shape: DecoderShape, plan: Plan, num_rows: int, num_copies: int) -> Prepared:
    weight = normal(plan, shape.width, seed=1)
    inputs = [normal(plan, num_rows, shape.width, seed=index) for index in range(num_copies)]
    calls = [partial(kernels.rms_norm, hidden, weight, _EPS) for hidden in inputs]
    return Prepared(
        calls, lambda: (calls[0](), reference.rms_norm(inputs[0].float(), weight.float(), _EPS))
    )


def _prepare_gates(shape: DecoderShape, plan: Plan, num_rows: int, num_copies: int) -> Prepared:
    inputs = [
        normal(plan, num_rows, 2 * shape.num_gated, seed=index) for index in range(num_copies)
    ]
    calls = [partial(_gate, gates) for gates in inputs]
    return Prepared(calls, lambda: (calls[0](), silu_and_mul(inputs[0].float())))


def _gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns the kernel of the gate after the product; a CPU has none of its own."""
    if not gate_up.is_cuda:
        return silu_and_mul(gate_up)
    from kernels.triton import linear

    return linear.silu_and_mul(gate_up)


def _prepare_product(shape: DecoderShape, plan: Plan, num_rows: int, num_copies: int) -> Prepared:
    hidden = normal(plan, num_rows, shape.width)
    matrix = normal(plan, 2 * shape.num_gated, shape.width, seed=1).mul_(shape.width**-0.5)
    use = WeightUse.GATED_LINEAR
    weights = []
    for _ in range(num_copies):
        weight = kernels.make_weight(
            2 * shape.num_gated, shape.width, matrix.dtype, matrix.device, use
        )
        for index, half in enumerate(matrix.chunk(2)):
            weight.rows(index * len(half), len(half)).copy_(half)
        weights.append(weight)
    calls = [partial(kernels.linear_silu_and_mul, hidden, weight) for weight in weights]

    def compare() -> tuple[Result, Result]:
        exact = DenseWeight(2 * shape.num_gated, shape.width, use, matrix.float())
        return calls[0](), reference.linear_silu_and_mul(hidden.float(), exact)

    return Prepared(calls, compare)


def _prepare_blocks(name: str, plan: Plan, num_words: int, num_copies: int) -> Prepared:
    """Prepares copies that share a pool; each uses other blocks of it."""
    count = plan.num_moved_blocks
    pool = normal(plan, num_copies * count, num_words, seed=1)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(pool), generator=generator).to(plan.device)
    buffer = normal(plan, count, num_words, seed=2)
    parts = torch.split(order, count)
    calls: list[Call]
    if name == "gather":
        calls = [partial(kernels.gather_blocks, pool, ids, buffer) for ids in parts]
    else:
        calls = [partial(kernels.scatter_blocks, buffer, pool, ids) for ids in parts]

    def compare() -> tuple[Result, Result]:
        calls[0]()
        return buffer.clone(), pool[parts[0]]

    return Prepared(calls, compare)


def _prepare_sampling(
    shape: DecoderShape,
    plan: Plan,
    num_rows: int,
    temperature: float,
    top_p: float,
    num_copies: int,
) -> Prepared:
    device = plan.device
    logits = [
        3 * normal(plan, num_rows, shape.vocab_size, seed=index).float()
        for index in range(num_copies)
    ]
    draws = DrawTable(
        temperature=torch.full((num_rows,), temperature, dtype=torch.float64, device=device),
        top_k=torch.zeros(num_rows, dtype=torch.int64, device=device),
        top_p=torch.full((num_rows,), top_p, dtype=torch.float64, device=device),
        log_min_p=torch.full((num_rows,), -torch.inf, dtype=torch.float64, device=device),
        seed=torch.arange(num_rows, device=device),
    )
    positions = torch.arange(num_rows, device=device) + 100
    calls = [partial(_draw, kernels, scores, draws, positions) for scores in logits]
    return Prepared(calls, lambda: (calls[0](), _draw(reference, logits[0], draws, positions)))


def _draw(
    module: ModuleType, logits: torch.Tensor, draws: DrawTable, positions: torch.Tensor
) -> torch.Tensor:
    maxima, likeliest = module.row_maxima(logits)
    draw_ids = torch.arange(len(logits), device=logits.device)
    tokens: torch.Tensor = module.draw_tokens(
        logits, maxima, likeliest, draws, draw_ids=draw_ids, positions=positions
    )
    return tokens
