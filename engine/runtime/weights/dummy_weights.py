"""`--load-format dummy`: random weights in the shape of config.json, and their fingerprint.

They are for measuring speed, which does not depend on the weights' values.
"""

from collections.abc import Mapping, Sequence

import torch
import xxhash

from engine.models.tensor_parts import TensorPart, fill
from engine.runtime.weights.checkpoint import Checkpoint
from engine.runtime.weights.quantized.online import read_part
from kernels.formats import WeightFormat

__all__ = ["draw_weights", "dummy_fingerprint"]

_SEED = 0
_STANDARD_DEVIATION = 0.02  # most checkpoints' `initializer_range`; keeps activations finite


def draw_weights(
    parts: Mapping[str, Sequence[TensorPart]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    rounding: Mapping[str, WeightFormat],
) -> None:
    """Fills a model's weights: norms with ones, everything else with small normal numbers.

    Processes that draw the same shapes on the same kind of device get the same numbers. Each
    tensor is drawn in temporary memory, so memory for the largest one must be free.

    Args:
        parts: by checkpoint name, the parts to fill. Ranks get parts of the same tensors.
        shapes: by name, of all tensors of the whole model.
        dtype: type of the weights.
        device: device of the weights.
        rounding: by name, the formats to which tensors are rounded.
    """
    generator = torch.Generator(device).manual_seed(_SEED)
    for name, shape in shapes.items():
        if len(shape) == 1 and not name.endswith(".bias"):
            numbers = torch.ones(shape, dtype=dtype, device=device)
        else:
            numbers = torch.randn(shape, generator=generator, dtype=dtype, device=device)
            numbers.mul_(_STANDARD_DEVIATION)
        for part in parts.get(name, ()):
            fill(part.target, read_part(numbers.__getitem__, part, rounding.get(name)))


def dummy_fingerprint(checkpoint: Checkpoint, device: torch.device) -> bytes:
    """Returns a digest of config.json and the kind of device, which determine the dummy weights.

    Args:
        checkpoint: the checkpoint, opened without its weights.
        device: the device that draws the weights.
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return bytes(xxhash.xxh3_128_digest(checkpoint.fingerprint() + f"dummy\0{kind}".encode()))
