"""The commands and programs of docs/grpc.md do what the page says, on a scripted server."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from baton.v1 import generation_pb2
from tests.support.fake_generation import FakeGeneration, running_fake_generation
from tests.support.grpc_clients.builds import PROTOS, go_variables
from tests.support.grpc_clients.page import code_under, printed_by, service_config
from tests.support.grpc_clients.program import require_client, running_client

ROOT = Path(__file__).parents[2]
ANSWER = "Hello, world"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # the first use of a language's tools builds its client
]


@pytest.fixture
def server() -> Iterator[FakeGeneration]:
    with running_fake_generation() as fake:
        yield fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the protos, in which the page's commands run."""
    (tmp_path / "protos").symlink_to(PROTOS)
    return tmp_path


def borrow_packages(folder: Path) -> None:
    """Lends the folder the npm packages that another program has installed."""
    _, built = require_client("grpc-js")
    (folder / "node_modules").symlink_to(built / "node_modules")


async def test_python(server: FakeGeneration, folder: Path) -> None:
    program = code_under("### Python", server.address)["python"]
    printed = await printed_by(sys.executable, "-c", program, folder=ROOT)
    assert printed == ANSWER


async def test_grpc_js(server: FakeGeneration, folder: Path) -> None:
    borrow_packages(folder)
    (folder / "client.mjs").write_text(code_under("### Node with grpc-js", server.address)["js"])
    assert await printed_by("node", "client.mjs", folder=folder) == ANSWER


async def test_connect_node(server: FakeGeneration, folder: Path) -> None:
    borrow_packages(folder)
    code = code_under("### Node with connect-node", server.address)
    commands = [line for line in code["sh"].splitlines() if not line.startswith("npm install")]
    (folder / "package.json").write_text("{}")
    await printed_by("sh", "-ec", "\n".join(commands), folder=folder)
    (folder / "client.js").write_text(code["js"])
    assert await printed_by("node", "client.js", folder=folder) == ANSWER


async def test_go(server: FakeGeneration, folder: Path) -> None:
    require_client("go")
    code = code_under("### Go", server.address)
    package = folder / "src/example.com/app"
    package.mkdir(parents=True)
    (package / "protos").symlink_to(PROTOS)
    await printed_by("sh", "-ec", code["sh"], folder=package)
    (package / "main.go").write_text(code["go"])
    printed = await printed_by("go", "run", ".", folder=package, **go_variables(folder))
    assert printed == ANSWER


async def test_ruby(server: FakeGeneration, folder: Path) -> None:
    require_client("ruby")
    if shutil.which("grpc_tools_ruby_protoc") is None:
        pytest.skip("ruby-grpc-tools not installed")
    code = code_under("### Ruby", server.address)
    await printed_by("sh", "-ec", f"mkdir gen\n{code['sh']}", folder=folder)
    assert await printed_by("ruby", "-I", "gen", "-e", code["ruby"], folder=folder) == ANSWER


@pytest.mark.parametrize("kind", ["grpc-js", "go"])
async def test_the_service_config_repeats_calls(server: FakeGeneration, kind: str) -> None:
    require_client(kind)
    text = service_config()
    options = {"grpc.service_config": text} if kind == "grpc-js" else json.loads(text)
    async with running_client(kind, server.address, options=options) as program:
        request = generation_pb2.GenerateRequest(text="fail")
        call = await program.call("Generate", request, timeoutS=30)
    assert call.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(server.requests) == 4
