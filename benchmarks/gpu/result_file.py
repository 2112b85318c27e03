"""Writes a run's results so that a reader finds a whole file at any time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["write_results"]


def write_results(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces the file; one that is interrupted here leaves the former as it was."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)
