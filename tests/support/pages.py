"""Code blocks and commands of the documentation's pages."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str, language: str) -> list[str]:
    """Returns the code blocks of a language.

    Args:
        page: its path in the repository.
        language: as after the fence.
    """
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )


def commands(block: str) -> list[list[str]]:
    """Returns the words of each command of a block of the shell, without comments."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
