"""The examples that need a server, as a reader runs them."""

import asyncio
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.http_cluster import MODEL, HttpCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
INTEGRATIONS = ROOT / ".venv-integrations" / "bin" / "python"
CITY = "(Rome|Oslo|Lima)"
WEATHER = rf"\{{.?'city': '{CITY}'"


async def printed_by(*command: object) -> str:
    """Runs an example; returns what it prints."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1"},
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


async def test_curl(http_cluster: HttpCluster) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    printed = await printed_by("sh", FOLDER / "curl.sh", http_cluster.url, MODEL)
    assert printed.count("data: [DONE]") == 1
    assert re.search('"content":"(yes|no)"', printed)
    assert '"input_tokens":' in printed
    paths = re.findall(r"^(/\S+)$", printed, re.MULTILINE)
    assert len(paths) == 7


async def test_openai_client(http_cluster: HttpCluster) -> None:
    printed = await printed_by(sys.executable, FOLDER / "openai_client.py", http_cluster.url, MODEL)
    assert re.search(f"^call: Weather city='{CITY}' unit='[CF]'$", printed, re.MULTILINE)
    assert re.search("^choice: (sunny|rainy)$", printed, re.MULTILINE)
    assert re.search(r"""^response: ['"].""", printed, re.MULTILINE)


async def test_anthropic_client(http_cluster: HttpCluster) -> None:
    printed = await printed_by(
        sys.executable, FOLDER / "anthropic_client.py", http_cluster.url, MODEL
    )
    assert re.search(rf"^call: \[\{{'city': '{CITY}'\}}\]$", printed, re.MULTILINE)
    assert re.search("^prompt: [0-9]+ tokens$", printed, re.MULTILINE)


async def test_grpc_client(http_cluster: HttpCluster) -> None:
    address = http_cluster.cluster.router.address
    printed = await printed_by(sys.executable, FOLDER / "grpc_client.py", address)
    assert f"model: {MODEL}" in printed
    assert printed.count("completion: ") == 2


async def test_structured_outputs(http_cluster: HttpCluster) -> None:
    address = http_cluster.cluster.router.address
    printed = await printed_by(sys.executable, FOLDER / "structured_outputs.py", address)
    assert re.search("^choice: '(yes|no)'", printed, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first import of a library compiles hundreds of modules
@pytest.mark.parametrize("name", ["langchain_chat", "litellm_chat", "llamaindex_chat"])
async def test_client_libraries(http_cluster: HttpCluster, name: str) -> None:
    if not INTEGRATIONS.exists():
        pytest.skip("make test-slow installs the client libraries")
    printed = await printed_by(INTEGRATIONS, FOLDER / f"{name}.py", http_cluster.url, MODEL)
    lines = dict(re.findall("^([a-z ]+): (.*)$", printed, re.MULTILINE))
    for kind in ("call", "streamed call"):
        assert "weather" in lines[kind]
        assert re.search(CITY, lines[kind])
    assert len(lines["answer"]) > 10
    if name == "langchain_chat":
        assert re.fullmatch(f"city='{CITY}'", lines["schema"])


async def test_the_table_lists_every_example() -> None:
    table = (FOLDER / "README.md").read_text()
    for example in FOLDER.iterdir():
        is_listed = re.search(rf"\({example.name}[/)]", table)
        assert is_listed or example.name in ("README.md", "__pycache__")
