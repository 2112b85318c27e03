"""How long a decode step takes at least. Pure."""

from benchmarks.model_cost import Ceilings, ModelShape, step_floor_s, token_floor_s

__all__ = ["decode_floor_s"]


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
