"""What a decoder's tokens cost in operations and bytes, and how long that takes at least. Pure.

A lower bound: weights are read once per step, all of a run's steps are as full
as its longest answer allows, a prefix that prompts share is computed once, only
tokens that draw the next one go through the last layer, and the KV that the others
leave there, reading KV, norms and the sampler cost nothing. Rates that were
measured on a machine that drifts are medians: a good round may come below.

How long a decode step takes at least. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.request import BenchRequest
from kvstore.layout import DTYPE_BYTES

__all__ = ["Ceilings", "ModelShape", "decode_floor_s", "floor_s", "step_floor_s", "token_floor_s"]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine does at best: bytes read, and matrix operations, per second."""

    read_bytes_per_s: float
    operations_per_s: float

    @classmethod
    def of_machine(cls, machine: Mapping[str, Any], dtype: str = "bfloat16") -> "Ceilings":
        """From `benchmarks.machine.describe_machine`, for products of `dtype`."""
        return cls(1e9 * machine["read_gb_per_s"], 1e9 * machine[f"{dtype}_gflop_per_s"])


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's size.

    Attributes:
        num_body_weights: of its layers.
        num_layers: how many these are, all of one size.
        num_head_weights: of the output projection, for tokens that draw the next one.
        num_attention_features: layers times query heads times the size of a head.
        bytes_per_weight: 2 in bfloat16.
    """

    num_body_weights: int
    num_layers: int
    num_head_weights: int
    num_attention_features: int
    bytes_per_weight: int = 2

    @classmethod
    def of_config(
        cls, config: Mapping[str, Any], num_weights: int, dtype: str = "bfloat16"
    ) -> "ModelShape":
        """From a checkpoint's config.json, how many weights it holds, and the type it runs in."""
        width = config["hidden_size"]
        head = config["vocab_size"] * width
        num_tables = 1 if config.get("tie_word_embeddings", False) else 2
        head_size = config.get("head_dim") or width // config["num_attention_heads"]
        num_layers = config["num_hidden_layers"]
        features = num_layers * config["num_attention_heads"] * head_size
        body = num_weights - num_tables * head
        return cls(body, num_layers, head, features, DTYPE_BYTES[dtype])


def token_floor_s(shape: ModelShape, ceilings: Ceilings) -> float:
    """Seconds per token of a request alone: the weights are read, the embeddings are not."""
    return _step_bytes(shape) / ceilings.read_bytes_per_s


def step_floor_s(shape: ModelShape, ceilings: Ceilings, batch_size: int, context: int) -> float:
    """Seconds of a step that takes `batch_size` sequences of `context` tokens one further."""
    per_token = shape.num_body_weights + shape.num_head_weights
    operations = 2 * per_token + 4 * shape.num_attention_features * context
    return max(token_floor_s(shape, ceilings), batch_size * operations / ceilings.operations_per_s)


def floor_s(requests: Sequence[BenchRequest], shape: ModelShape, ceilings: Ceilings) -> float:
    """Seconds for all requests, if they come at once."""
    num_steps = max(request.num_output_tokens for request in requests)
    return max(
        _operations(requests, shape) / ceilings.operations_per_s,
        num_steps * _step_bytes(shape) / ceilings.read_bytes_per_s,
    )


def _step_bytes(shape: ModelShape) -> int:
    return shape.bytes_per_weight * (shape.num_body_weights + shape.num_head_weights)


def _operations(requests: Sequence[BenchRequest], shape: ModelShape) -> float:
    drawing = _drawing_contexts(requests)
    last_layer = 1 / shape.num_layers
    return (
        (1 - last_layer) * _body_operations(_contexts(requests), shape)
        + last_layer * _body_operations(drawing, shape)
        + 2 * shape.num_head_weights * len(drawing)
    )


def _body_operations(contexts: Sequence[int], shape: ModelShape) -> int:
    """Of all layers, for tokens that attend to so many each."""
    products = 2 * shape.num_body_weights * len(contexts)
    return products + 4 * shape.num_attention_features * sum(contexts)


def _drawing_contexts(requests: Sequence[BenchRequest]) -> list[int]:
    """For each token that draws the next one, how many it attends to, itself included."""
    contexts: list[int] = []
    for request in requests:
        length = len(request.prompt_token_ids)
        contexts += range(length, length + request.num_output_tokens)
    return contexts


def _contexts(requests: Sequence[BenchRequest]) -> list[int]:
    """For each token that must go through the model, how many it attends to, itself included.

    A request's last token is drawn and goes nowhere.
    """
    contexts = _prompt_contexts(requests)
    for request in requests:
        length = len(request.prompt_token_ids)
        contexts += range(length + 1, length + request.num_output_tokens)
    return contexts


def _prompt_contexts(requests: Sequence[BenchRequest]) -> list[int]:
    """Of all prompts, each distinct beginning once: the nodes of their prefix tree."""
    nodes: dict[tuple[int, int], int] = {}
    contexts = []
    for request in requests:
        parent = 0
        for position, token in enumerate(request.prompt_token_ids):
            node = nodes.get((parent, token))
            if node is None:
                node = nodes[parent, token] = len(nodes) + 1
                contexts.append(position + 1)
            parent = node
    return contexts


def decode_floor_s(
    shape: ModelShape,
    ceilings: Ceilings,
    *,
    batch_size: int,
    context: int,
    kv_bytes_per_token: int,
) -> float:
    """Seconds of a step: weights and all KV are read once, or all operations are done.

    Args:
        shape: the model's.
        ceilings: the device's; what it copies per second counts as what it reads.
        batch_size: sequences.
        context: tokens of each, whose KV is read.
        kv_bytes_per_token: of all layers.
    """
    kv_s = batch_size * context * kv_bytes_per_token / ceilings.read_bytes_per_s
    of_bytes = token_floor_s(shape, ceilings) + kv_s
    return max(of_bytes, step_floor_s(shape, ceilings, batch_size, context))
