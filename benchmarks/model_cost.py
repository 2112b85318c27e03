"""Least times of a decoder's work: its operations and bytes over the machine's ceilings. Pure.

The floors are lower bounds. Each step reads the weights once, of a mixture of experts those of a
token's experts. A run has as many steps as its longest answer has tokens. A prefix that prompts
share is computed once. Only tokens that draw the next one go through the last layer. Reading KV,
norms and sampling cost nothing. If the ceilings are medians of a machine whose speed changes, a
good round may be faster than its floor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.request import BenchRequest

__all__ = ["Ceilings", "ModelShape", "decode_floor_s", "floor_s", "step_floor_s", "token_floor_s"]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The machine's best rates: bytes read and matrix operations per second."""

    read_bytes_per_s: float
    operations_per_s: float

    @classmethod
    def of_machine(cls, machine: Mapping[str, Any], dtype: str = "bfloat16") -> "Ceilings":
        """Returns the rates of `benchmarks.machine.describe_machine`, for products of `dtype`."""
        return cls(1e9 * machine["read_gb_per_s"], 1e9 * machine[f"{dtype}_gflop_per_s"])


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's size.

    Attributes:
        num_body_weights: weights of all layers that a token uses.
        num_layers: number of layers, all of one size.
        num_head_weights: weights of the output projection, which tokens that draw the next one use.
        num_attention_features: layers with attention times query heads times the size of a head.
        bytes_per_weight: size of a weight, 2 in bfloat16; the mean of a file with several formats.
    """

    num_body_weights: int
    num_layers: int
    num_head_weights: int
    num_attention_features: int
    bytes_per_weight: float = 2


def token_floor_s(shape: ModelShape, ceilings: Ceilings) -> float:
    """Returns the least seconds per token of one request: its step reads all weights but the
    embeddings.
    """
    return _step_bytes(shape) / ceilings.read_bytes_per_s


def step_floor_s(shape: ModelShape, ceilings: Ceilings, batch_size: int, context: int) -> float:
    """Returns the least seconds of a step that decodes sequences of `context` tokens each."""
    per_token = shape.num_body_weights + shape.num_head_weights
    operations = 2 * per_token + 4 * shape.num_attention_features * context
    return max(token_floor_s(shape, ceilings), batch_size * operations / ceilings.operations_per_s)


def floor_s(requests: Sequence[BenchRequest], shape: ModelShape, ceilings: Ceilings) -> float:
    """Returns the least seconds for requests that arrive at the same time."""
    num_steps = max(request.num_output_tokens for request in requests)
    return max(
        _operations(requests, shape) / ceilings.operations_per_s,
        num_steps * _step_bytes(shape) / ceilings.read_bytes_per_s,
    )


def _step_bytes(shape: ModelShape) -> float:
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
    """Returns the operations of all layers for tokens that attend to `contexts` tokens each."""
    products = 2 * shape.num_body_weights * len(contexts)
    return products + 4 * shape.num_attention_features * sum(contexts)


def _drawing_contexts(requests: Sequence[BenchRequest]) -> list[int]:
    """Returns, for each token that draws the next one, how many tokens it attends to."""
    contexts: list[int] = []
    for request in requests:
        length = len(request.prompt_token_ids)
        contexts += range(length, length + request.num_output_tokens)
    return contexts


def _contexts(requests: Sequence[BenchRequest]) -> list[int]:
    """Returns, for each token that goes through the model, how many tokens it attends to.

    A request's last token is drawn, but does not go through the model.
    """
    contexts = _prompt_contexts(requests)
    for request in requests:
        length = len(request.prompt_token_ids)
        contexts += range(length + 1, length + request.num_output_tokens)
    return contexts


def _prompt_contexts(requests: Sequence[BenchRequest]) -> list[int]:
    """Returns the contexts of the prompts' tokens, with each shared prefix counted once."""
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
    state_bytes: int = 0,
) -> float:
    """Returns the least seconds of a decode step that also reads the KV of all sequences, and
    reads and writes their states.

    Args:
        shape: the model's size.
        ceilings: the device's rates. On a GPU, bytes copied per second stand for bytes read.
        batch_size: number of sequences.
        context: tokens of each sequence.
        kv_bytes_per_token: bytes of a token's KV over all layers.
        state_bytes: bytes of a sequence's states over all recurrent layers.
    """
    num_bytes = batch_size * (context * kv_bytes_per_token + 2 * state_bytes)
    of_bytes = token_floor_s(shape, ceilings) + num_bytes / ceilings.read_bytes_per_s
    return max(of_bytes, step_floor_s(shape, ceilings, batch_size, context))
