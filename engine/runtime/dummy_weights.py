"""Random weights instead of a checkpoint's, drawn on the device: `--load-format dummy`.

For measuring: speed does not depend on what the weights say. They need no file but config.json.
"""

from collections.abc import Mapping

import torch
import xxhash

from engine.models.linear import WeightTarget
from engine.runtime.checkpoint import Checkpoint

__all__ = ["draw_weights", "dummy_fingerprint"]

_SEED = 0
_STANDARD_DEVIATION = 0.02  # `initializer_range` of most checkpoints: activations stay finite


def draw_weights(
    targets: Mapping[str, WeightTarget], dtype: torch.dtype, device: torch.device
) -> None:
    """Fills a model's weights: norms with ones, everything else with small normal numbers.

    The same for every process that draws the same shapes on the same kind of device. Each tensor
    is drawn whole before it takes its place, so memory for the largest one must be free.

    Args:
        targets: checkpoint name -> what takes over that tensor.
        dtype: of the weights.
        device: where they are.
    """
    generator = torch.Generator(device).manual_seed(_SEED)
    for name, target in targets.items():
        if len(target.shape) == 1 and not name.endswith(".bias"):
            target.copy_(torch.ones(target.shape, dtype=dtype, device=device))
        else:
            numbers = torch.randn(target.shape, generator=generator, dtype=dtype, device=device)
            target.copy_(numbers.mul_(_STANDARD_DEVIATION))


def dummy_fingerprint(checkpoint: Checkpoint, device: torch.device) -> bytes:
    """Digest of config.json and of the kind of device: another kind draws other numbers.

    Args:
        checkpoint: opened without its weights.
        device: that they are drawn on.
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return bytes(xxhash.xxh3_128_digest(checkpoint.fingerprint() + f"dummy\0{kind}".encode()))
