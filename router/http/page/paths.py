"""Paths of the page: its files, by the path at which each is answered, and the router's state."""

from collections.abc import Mapping
from pathlib import Path

__all__ = ["ASSET_PATHS", "FILES", "STATUS_PATH"]

STATUS_PATH = "/status"
_FOLDER = Path(__file__).parent / "files"
FILES: Mapping[str, Path] = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in sorted(_FOLDER.iterdir())
}
"""The files by path. There are no others: a path is never joined with a folder."""
ASSET_PATHS = frozenset(FILES)
"""Paths of the files."""
