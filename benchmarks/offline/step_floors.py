"""The least time of a step, summed over its operations.

Each operation must move its bytes or compute its products, whichever takes longer; the next one
begins after it. The sum is therefore higher than the floor of the whole step in
`benchmarks.model_cost`, which lets the bytes of one operation pass while another one computes.
"""

from collections.abc import Iterator, Sequence

from benchmarks.kernels.case import (
    ByteSpan,
    Cost,
    DecoderShape,
    attention_cost,
    limit_s,
    product_cost,
)
from benchmarks.model_cost import Ceilings

__all__ = ["operations_floor_s", "operations_of_step"]


def operations_floor_s(
    shape: DecoderShape,
    spans: Sequence[ByteSpan],
    ceilings: Ceilings,
    *,
    num_drawn: int,
    bytes_per_number: int = 2,
) -> float:
    """Returns the least seconds of a step of a dense decoder.

    Args:
        shape: the model.
        spans: the step's sequences.
        ceilings: the device's rates.
        num_drawn: sequences that draw a token, whose logits the head computes.
        bytes_per_number: of a weight, and of a number in the KV cache.
    """
    operations = operations_of_step(
        shape, spans, num_drawn=num_drawn, bytes_per_number=bytes_per_number
    )
    return sum(times * limit_s(cost, ceilings) for _, times, cost in operations)


def operations_of_step(
    shape: DecoderShape, spans: Sequence[ByteSpan], *, num_drawn: int, bytes_per_number: int = 2
) -> Iterator[tuple[str, int, Cost]]:
    """Yields the name of each operation, how often the step runs it, and the cost of one run.

    The arguments are those of `operations_floor_s`.
    """
    num_rows = sum(span.num_queries for span in spans)
    num_qkv = shape.num_query_features + 2 * shape.num_kv_features
    for name, num_outputs, num_inputs in (
        ("qkv", num_qkv, shape.width),
        ("out", shape.width, shape.num_query_features),
        ("gate, up", 2 * shape.num_gated, shape.width),
        ("down", shape.width, shape.num_gated),
    ):
        cost = product_cost(num_rows, num_outputs, num_inputs, bytes_per_number)
        yield name, shape.num_layers, cost
    attention = attention_cost(
        spans,
        num_query_features=shape.num_query_features,
        kv_bytes_per_token=2 * shape.num_kv_features * bytes_per_number,
    )
    yield "attention", shape.num_layers, attention
    yield "head", 1, product_cost(num_drawn, shape.vocab_size, shape.width, bytes_per_number)
