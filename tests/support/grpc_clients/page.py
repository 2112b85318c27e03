"""The commands and programs of docs/grpc.md, as a reader copies them."""

import asyncio
import os
import re
from pathlib import Path

__all__ = ["code_under", "printed_by", "service_config"]

_PAGE = Path(__file__).parents[3] / "docs" / "grpc.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ADDRESS = "127.0.0.1:50051"


def code_under(heading: str, address: str = _ADDRESS) -> dict[str, str]:
    """Returns the blocks of code under a heading by language; they call the router at `address`."""
    text = _PAGE.read_text().split(f"\n{heading}\n", 1)[1]
    section = re.split(r"^##+ ", text, maxsplit=1, flags=re.MULTILINE)[0]
    blocks = {
        language: code.replace(_ADDRESS, address) for language, code in _BLOCK.findall(section)
    }
    assert blocks, f"nothing to run under {heading!r}"
    return blocks


async def printed_by(*command: object, folder: Path, **variables: str) -> str:
    """Runs a command in a folder; returns what it prints."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **variables},
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


def service_config() -> str:
    """Returns the page's service config."""
    return code_under("## Retries")["json"]
