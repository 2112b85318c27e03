"""The machine's ceilings and the size of the model that an engine runs."""

from dataclasses import dataclass
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.model_cost import Ceilings, ModelShape
from engine.config import EngineConfig
from engine.runtime.device import resolve_device
from engine.runtime.weights.checkpoint import open_checkpoint
from engine.runtime.weights.described_model import DescribedModel
from kvstore.layout import DTYPE_BYTES

__all__ = ["Floors", "measure_floors", "read_shape"]


@dataclass(frozen=True, slots=True)
class Floors:
    """The machine's limits on an engine's figures.

    Attributes:
        machine: the machine's names, and its ceilings, as measured now.
        ceilings: the ceilings for the model's type.
        shape: the model's size.
        dtype: type of weights and activations.
    """

    machine: dict[str, Any]
    ceilings: Ceilings
    shape: ModelShape
    dtype: str


def measure_floors(config: EngineConfig) -> Floors:
    """Measures the ceilings and reads the model's size.

    It needs half a GiB of memory, so call it after `peak_memory_bytes`.
    """
    shape, dtype = read_shape(config)
    machine = describe_machine(str(resolve_device(config.device)), config.num_threads)
    # Where float16 products are fast, they are as fast as bfloat16 products.
    product = "float32" if dtype == "float32" else "bfloat16"
    return Floors(machine, Ceilings.of_machine(machine, product), shape, dtype)


def read_shape(config: EngineConfig) -> tuple[ModelShape, str]:
    """Returns the size of a checkpoint's model, and the type that it computes in."""
    checkpoint = open_checkpoint(config.model, with_weights=config.load_format != "dummy")
    described = DescribedModel.of(checkpoint)
    model, num_weights = described.config, described.build().num_weights()
    dtype = described.resolve_dtype(config.dtype)
    head = model.vocab_size * model.hidden_size
    num_tables = 1 if model.tie_word_embeddings else 2
    shape = ModelShape(
        num_body_weights=num_weights - num_tables * head,
        num_layers=model.num_layers,
        num_head_weights=head,
        num_attention_features=model.num_layers * model.num_heads * model.head_dim,
        bytes_per_weight=DTYPE_BYTES[dtype],
    )
    return shape, dtype
