"""The settings of a comparison, and the environments that the engines run in."""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from baton.common.errors import ConfigurationError

__all__ = [
    "NotMeasurableError",
    "Setting",
    "add_peer_args",
    "inherited_variables",
    "peer_python",
]

_PEERS_FOLDER = Path("~/.cache/baton-peers")
_MAKE_ENVIRONMENT = Path(__file__).parent / "make_env.sh"
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")
"""Environment variables of Baton's environment that would affect those of peers."""


class NotMeasurableError(ConfigurationError):
    """An engine, or a library that it is measured with, is not installed, or the engine cannot
    serve the model, or be held to an instruction set.
    """


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all engines share.

    Attributes:
        model: checkpoint folder, or a GGUF file.
        num_threads: threads that compute.
        peers_folder: has an environment per peer.
        max_model_len: most tokens of a request.
        device: torch's name of where engines compute.
    """

    model: Path
    num_threads: int
    peers_folder: Path
    max_model_len: int
    device: str = "cpu"

    @property
    def is_gguf(self) -> bool:
        """Whether the model is a GGUF file."""
        return self.model.suffix == ".gguf"


def add_peer_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of commands that run other engines."""
    parser.add_argument(
        "--num-threads", type=int, help="threads of each engine (default: every core)"
    )
    parser.add_argument(
        "--peers-folder",
        type=Path,
        default=_PEERS_FOLDER,
        help="holds the engines' environments and models (default: %(default)s)",
    )


def peer_python(home: str, setting: Setting) -> Path:
    """Returns the interpreter of an environment below the folder of peers.

    Raises:
        NotMeasurableError: there is none.
    """
    python = setting.peers_folder / home / "bin" / "python"
    if not python.exists() and setting.device != "cpu":
        return Path(sys.executable)  # a machine with a GPU may have no other
    if not python.exists():
        raise NotMeasurableError(
            f"there is no environment in {python.parents[1]}; make it with "
            f"{_MAKE_ENVIRONMENT} {home} {python.parents[1]}"
        )
    return python


def inherited_variables() -> dict[str, str]:
    """Returns the part of this process's environment that a peer's processes get."""
    return {name: text for name, text in os.environ.items() if name not in _NOT_INHERITED}
