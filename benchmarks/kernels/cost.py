"""The least that one call of a primitive costs. Pure.

Only data that every call must move to or from memory is counted: weights, KV, and the inputs of
primitives that compute next to nothing. Data passed from call to call stays in cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.model_cost import Ceilings

__all__ = ["ByteSpan", "Cost", "attention_cost", "limit_s", "product_cost"]


@dataclass(frozen=True, slots=True)
class Cost:
    """The least cost of one call.

    Attributes:
        num_bytes: bytes moved.
        num_operations: operations of matrix products.
    """

    num_bytes: int
    num_operations: int = 0


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """The part of a sequence that a step computes.

    Attributes:
        num_cached: tokens before the span, whose KV is cached.
        num_queries: tokens of the span.
    """

    num_cached: int
    num_queries: int

    @property
    def context(self) -> int:
        """Tokens up to the end of the span."""
        return self.num_cached + self.num_queries


def product_cost(num_rows: int, num_outputs: int, num_inputs: int, bytes_per_weight: int) -> Cost:
    """Returns the cost of `num_rows` rows times a weight `[num_outputs, num_inputs]`, read once."""
    num_weights = num_outputs * num_inputs
    return Cost(num_weights * bytes_per_weight, 2 * num_rows * num_weights)


def attention_cost(
    spans: Sequence[ByteSpan],
    *,
    num_query_features: int,
    kv_bytes_per_token: int,
    sliding_window: int | None = None,
) -> Cost:
    """Returns the cost of causal attention: KV that any query attends to is read once.

    Args:
        spans: the step's sequences.
        num_query_features: query heads times their features.
        kv_bytes_per_token: of one layer's K and V.
        sliding_window: how many tokens a query attends to, itself included; None for all.
    """
    num_read = num_pairs = 0
    for span in spans:
        window = sliding_window or span.context
        num_read += min(span.context, window + span.num_queries - 1)
        positions = range(span.num_cached + 1, span.context + 1)
        num_pairs += sum(min(position, window) for position in positions)
    return Cost(num_read * kv_bytes_per_token, 4 * num_query_features * num_pairs)


def limit_s(cost: Cost, ceilings: Ceilings) -> float:
    """Returns the least seconds of a call, for its bytes or operations, whichever take longer."""
    return max(
        cost.num_bytes / ceilings.read_bytes_per_s,
        cost.num_operations / ceilings.operations_per_s,
    )
