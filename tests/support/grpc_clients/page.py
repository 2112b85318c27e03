"""The commands and programs of docs/grpc.md, as a reader copies them."""

import re
from pathlib import Path

__all__ = ["code_under", "service_config"]

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


def service_config() -> str:
    """Returns the page's service config."""
    return code_under("## Retries")["json"]
