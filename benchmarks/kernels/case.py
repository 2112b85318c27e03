"""`Case`: a primitive on inputs of one shape, and the least that a call costs.

`Numbers` makes the inputs, and `DecoderShape` has the numbers of a model. A cost counts only data
that every call must move to or from memory: weights, KV, and the inputs of primitives that compute
next to nothing. Data passed from call to call stays in cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from benchmarks.model_cost import Ceilings
from kernels import Weight, WeightUse

__all__ = [
    "CPU",
    "SIZES",
    "ByteSpan",
    "Call",
    "Case",
    "Cost",
    "DecoderShape",
    "Numbers",
    "Result",
    "Sizes",
    "attention_cost",
    "limit_s",
    "product_cost",
    "rows_in_words",
]
Result = torch.Tensor | tuple[torch.Tensor, ...]
Call = Callable[[], Result]
CPU = torch.device("cpu")


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


@dataclass(frozen=True, slots=True)
class Numbers:
    """The kernels and inputs of a measurement.

    Two instances that differ only in `module` or `kept_as` produce equal inputs.

    Attributes:
        module: `kernels`, or `kernels.reference`.
        dtype: the type that inputs are rounded to.
        kept_as: the type of the tensors that hold them.
        device: where they are.
    """

    module: ModuleType
    dtype: torch.dtype
    kept_as: torch.dtype
    device: torch.device = CPU

    def normal(self, *shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
        """Returns normal numbers of standard deviation `scale`, a function of shape and seed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        numbers = torch.randn(shape, generator=generator, device=self.device).mul_(scale)
        return numbers.to(self.dtype).to(self.kept_as)

    def in_float32(self) -> "Numbers":
        """Returns the same with inputs of float32, such as logits."""
        return replace(self, dtype=torch.float32, kept_as=torch.float32)

    def weights(
        self, num_rows: int, num_columns: int, use: WeightUse, num_copies: int
    ) -> list[Weight]:
        """Makes equal weights, scaled so that products keep the size of their inputs."""
        matrix = self.normal(num_rows, num_columns, seed=1, scale=num_columns**-0.5)
        return [self._filled(matrix, use) for _ in range(num_copies)]

    def _filled(self, matrix: torch.Tensor, use: WeightUse) -> Weight:
        weight: Weight = self.module.make_weight(*matrix.shape, matrix.dtype, self.device, use)
        parts = matrix.chunk(2 if use is WeightUse.GATED_LINEAR else 1)
        for index, part in enumerate(parts):
            weight.rows(index * len(part), len(part)).copy_(part)
        return weight


@dataclass(frozen=True, slots=True)
class Case:
    """A primitive on inputs of one shape.

    Attributes:
        primitive: its name in `kernels`.
        what: the use of the primitive in a model.
        size: rows, or sequences and their contexts, in words.
        cost: of a call.
        num_terms: terms of the longest sums; errors grow with it.
        make_calls: takes kernels and numbers, and the number of copies of the inputs that must
            come from memory; returns that many calls, each on its own copy.
        max_copies: the most copies that can be made; None for no limit.
        is_recordable: False if calls overwrite inputs, which a recording would place in its arena.
    """

    primitive: str
    what: str
    size: str
    cost: Cost
    num_terms: int
    make_calls: Callable[[Numbers, int], Sequence[Call]]
    max_copies: int | None = None
    is_recordable: bool = True


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the cases on one kind of device.

    Attributes:
        product_rows: rows of products.
        few_rows: those whose products two kernels can compute, which are measured with either.
        hidden_rows: rows of hidden states, for norms and look-ups.
        sequences: rows of logits, of which the head computes no more.
        drawn: rows that draw.
        ruled: rows that have rules.
        decode: (number of sequences, context of each) of decode steps.
        uneven: (number of sequences, context of each, context of one more) of decode steps.
        chunks: (tokens cached, tokens computed) of chunks of a prompt.
        rotated: numbers of sequences whose tokens are rotated.
    """

    product_rows: Sequence[int]
    few_rows: Sequence[int]
    hidden_rows: Sequence[int]
    sequences: Sequence[int]
    drawn: Sequence[int]
    ruled: Sequence[int]
    decode: Sequence[tuple[int, int]]
    uneven: Sequence[tuple[int, int, int]]
    chunks: Sequence[tuple[int, int]]
    rotated: Sequence[int]


SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        "cpu": Sizes(
            product_rows=(1, 4, 16, 48, 128, 512),
            few_rows=(),
            hidden_rows=(1, 16, 512),
            sequences=(1, 16, 48),
            drawn=(1, 32),  # in torch, more would take seconds
            ruled=(1, 32, 256),
            decode=((1, 128), (1, 2048), (16, 128), (16, 512), (16, 2048), (48, 512)),
            uneven=((15, 128, 2048),),
            chunks=((0, 512), (2048, 512)),
            rotated=(1, 16, 48),
        ),
        "cuda": Sizes(
            product_rows=(1, 8, 16, 32, 64, 256, 8192),
            few_rows=(1, 8, 16),
            hidden_rows=(1, 256, 8192),
            sequences=(1, 64, 256),
            drawn=(1, 256),
            ruled=(1, 256),
            decode=tuple((count, context) for context in (512, 8192) for count in (1, 16, 64, 256)),
            uneven=((63, 512, 32_768),),
            chunks=((0, 2048), (0, 8192), (6144, 2048)),
            rotated=(1, 64, 256),
        ),
    }
)
"""By the type of a torch device."""


def rows_in_words(num_rows: int) -> str:
    """Returns a number of rows as text for `Case.size`."""
    return f"{num_rows} row{'s' if num_rows > 1 else ''}"


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The numbers that decide the sizes of a decoder's matrices and of its KV cache.

    Attributes:
        width: features of a hidden state.
        num_gated: features between the gated layer and the one after it.
        num_layers: layers, which share a KV pool.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: features of a head.
        vocab_size: rows of the embedding and of the head.
        has_tied_head: whether the embedding is the head too, in the layout of linear layers.
    """

    width: int
    num_gated: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    has_tied_head: bool

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "DecoderShape":
        """Reads the fields of a checkpoint's config.json."""
        width, num_heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            width=width,
            num_gated=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or width // num_heads,
            vocab_size=config["vocab_size"],
            has_tied_head=config.get("tie_word_embeddings", False),
        )

    @property
    def num_query_features(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def num_kv_features(self) -> int:
        """Features of all key heads; the value heads have the same number."""
        return self.num_kv_heads * self.head_dim
