"""The bundled demo model: its folder, and a prompt that it completes readably."""

from pathlib import Path

__all__ = ["DEMO_PROMPT", "demo_model_path"]

# The prompt has more than 32 tokens, so that it fills whole KV blocks.
DEMO_PROMPT = (
    "Open the file and return a corresponding file object. If the file cannot be opened, "
    "an OSError is raised.\n\nThe mode is an optional string that specifies the mode in "
    "which the file is opened."
)


def demo_model_path() -> Path:
    """Returns the checkpoint folder of the demo model, which is part of the installed package."""
    return Path(__file__).parents[2] / "demo_model"
