"""The ceilings of the machine and the cost of the model that an engine runs."""

from dataclasses import dataclass
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.model_cost import Ceilings, ModelShape
from benchmarks.models import num_weights
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.models.registry import family_of
from engine.runtime.checkpoint import open_checkpoint
from engine.runtime.device import resolve_device
from kvstore.layout import DTYPE_BYTES

__all__ = ["Floors", "measure_floors"]


@dataclass(frozen=True, slots=True)
class Floors:
    """What bounds an engine's figures.

    Attributes:
        machine: what it is, and its ceilings, as measured now.
        ceilings: those that this model meets.
        shape: the model's size.
    """

    machine: dict[str, Any]
    ceilings: Ceilings
    shape: ModelShape


def measure_floors(config: EngineConfig, core: EngineCore) -> Floors:
    """Measures the ceilings and reads the model's size.

    Call it after `peak_memory_bytes`: it takes half a GiB.
    """
    dtype = core.info.layout.dtype
    machine = describe_machine(str(resolve_device(config.device)), config.num_threads)
    # float16 products are as fast as bfloat16 ones, where either is fast.
    product = "float32" if dtype == "float32" else "bfloat16"
    return Floors(machine, Ceilings.of_machine(machine, product), _shape_of(config.model, dtype))


def _shape_of(model: str, dtype: str) -> ModelShape:
    from transformers import AutoConfig

    checkpoint = open_checkpoint(model)
    family = family_of(checkpoint.architecture)
    config = family.read_config(AutoConfig.from_pretrained(checkpoint.folder))
    head = config.vocab_size * config.hidden_size
    num_tables = 1 if config.tie_word_embeddings else 2
    return ModelShape(
        num_body_weights=num_weights(checkpoint.folder) - num_tables * head,
        num_layers=config.num_layers,
        num_head_weights=head,
        num_attention_features=config.num_layers * config.num_heads * config.head_dim,
        bytes_per_weight=DTYPE_BYTES[dtype],
    )
