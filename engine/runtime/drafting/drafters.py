"""Makes the drafter that an engine's `speculative_config` asks for."""

import torch

from engine.config import EngineConfig
from engine.runner import ModelInfo
from engine.runtime.drafting.draft_heads import EagleDrafter, MedusaDrafter
from engine.runtime.drafting.draft_model import DraftModel
from engine.runtime.drafting.drafter import Drafter
from engine.runtime.weights.loader import LoadedModel

__all__ = ["make_drafter"]


def make_drafter(
    config: EngineConfig,
    served: LoadedModel,
    info: ModelInfo,
    device: torch.device,
    *,
    progress: bool,
) -> Drafter | None:
    """Loads the model or heads that draft tokens behind the served model's steps; None if none do.

    Args:
        config: the engine's flags.
        served: the served model.
        info: its properties.
        device: of the served model.
        progress: whether loading shows a progress bar.

    Raises:
        ConfigurationError: the checkpoint is invalid, or does not fit the served model.
    """
    speculative = config.speculative_config
    if speculative is None or not speculative.has_model:
        return None
    name = speculative.model
    assert name is not None, "such methods have a model"
    if speculative.method == "medusa":
        return MedusaDrafter(config, served, info, device, name)
    if speculative.method in ("eagle", "eagle3"):
        is_eagle3 = speculative.method == "eagle3"
        return EagleDrafter(config, served, info, device, name, is_eagle3=is_eagle3)
    return DraftModel(config, served, info, device, progress=progress)
