"""Reads the size of the model in a checkpoint folder or a GGUF file, from which floors follow."""

import math

from baton.common.model_files.gguf import GgufFile
from benchmarks.model_cost import ModelShape
from engine.config import EngineConfig
from engine.runtime.weights.checkpoint import open_checkpoint
from engine.runtime.weights.described_model import DescribedModel
from kvstore.layout import DTYPE_BYTES

__all__ = ["describe_model", "read_shape"]


def describe_model(config: EngineConfig) -> DescribedModel:
    """Reads the headers of the model that a config names."""
    has_weights = config.load_format != "dummy"
    return DescribedModel.of(open_checkpoint(config.model, with_weights=has_weights))


def read_shape(config: EngineConfig) -> tuple[ModelShape, str]:
    """Returns the size of a model, and the type that it computes in.

    The weights of a checkpoint folder have that type when they are served; those of a GGUF file
    are counted as the file has them.
    """
    described = describe_model(config)
    files = described.checkpoint.files
    model, num_weights = described.config, described.build().num_weights()
    dtype = described.resolve_dtype(config.dtype)
    head = model.vocab_size * model.hidden_size
    num_tables = 1 if model.tie_word_embeddings else 2
    heads = [model.head_dim] * (model.num_layers - len(model.recurrent_layers))
    heads = [shape.head_dim for shape in model.kv_shapes] or heads
    num_read = num_weights - (num_tables - 1) * head
    shape = ModelShape(
        num_body_weights=num_read - head - model.num_unused_weights,
        num_layers=model.num_layers,
        num_head_weights=head,
        num_attention_features=model.num_heads * sum(heads),
        bytes_per_weight=(
            _read_bytes(files) / num_read if isinstance(files, GgufFile) else DTYPE_BYTES[dtype]
        ),
    )
    return shape, dtype


def _read_bytes(file: GgufFile) -> int:
    """Returns the bytes of a file's weights that a step reads, with those of all experts.

    A step reads few rows of an embedding, but all of one that is also the head.
    """
    import gguf  # an image for GPUs lacks it, which serves no such files

    tensors = dict(file.header.tensors)
    if "output.weight" in tensors:
        del tensors["token_embd.weight"]
    total = 0
    for tensor in tensors.values():
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
        total += math.prod(tensor.shape) // block * block_bytes
    return total
