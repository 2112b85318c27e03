"""Client libraries of other languages, directly and through proxies, against one real cluster."""

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import grpc
import pytest
import pytest_asyncio

from baton.common.model_files.named_models import demo_model_path
from baton.v1 import generation_pb2_grpc
from tests.support.cluster import WORKER_CALL, Cluster, running_cluster
from tests.support.grpc_clients.answers import CASES, Candidate, candidates_of, stop_request
from tests.support.grpc_clients.builds import KINDS, PROTOS, go_variables
from tests.support.grpc_clients.page import code_under, printed_by
from tests.support.grpc_clients.program import ClientProgram, require_client, running_client
from tests.support.proxies import PROXIES, running_proxy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # the first use of a program builds it
    pytest.mark.asyncio(loop_scope="module"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
METHODS = ("Generate", "GenerateStream")
ROUTES = ("direct", *PROXIES)


@dataclass
class Fixture:
    """The cluster, what the Python client gets from it, and its proxies."""

    cluster: Cluster
    folder: Path
    stack: AsyncExitStack
    requests: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, dict[tuple[int, int], Candidate]] = field(default_factory=dict)
    _proxies: dict[str, str] = field(default_factory=dict)

    @property
    def router(self) -> str:
        return self.cluster.router.address

    async def address(self, route: str) -> str:
        """Returns the address to call; starts the proxy when it is first used."""
        if route == "direct":
            return self.router
        if route not in self._proxies:
            port = self.cluster.http_url.rpartition(":")[2]
            proxy = running_proxy(route, self.folder, self.router, port)
            self._proxies[route] = await self.stack.enter_async_context(proxy)
        return self._proxies[route]

    async def ask_python(self) -> None:
        """Makes the requests with Python's library."""
        async with grpc.aio.insecure_channel(self.router) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            self.requests = {name: build() for name, build in CASES.items()}
            greedy = await stub.Generate(self.requests["greedy"], timeout=60)
            self.requests["stop"] = stop_request(greedy.completions[0].text)
            for name, request in self.requests.items():
                answer = candidates_of([await stub.Generate(request, timeout=60)])
                self.expected[name] = {key: each.nearly() for key, each in answer.items()}

    async def running_requests(self) -> float:
        request = Request(f"{self.cluster.http_url}/metrics", headers=dict(WORKER_CALL))
        text = await asyncio.to_thread(lambda: urlopen(request, timeout=30).read().decode())
        (number,) = re.findall(r"^baton_router_running_requests (\S+)", text, re.MULTILINE)
        return float(number)

    async def until_idle(self) -> None:
        """Waits until no request runs on any tier."""
        async with asyncio.timeout(60):
            while await self.running_requests():  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.05)
        await self.cluster.wait_pools_full()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fixture]:
    folder = tmp_path_factory.mktemp("grpc-clients")
    connector = f"file://{folder}/kv"
    cluster = running_cluster(folder, model=demo_model_path(), kv_connector=connector, http=True)
    async with cluster as running, AsyncExitStack() as stack:
        fixture = Fixture(running, folder, stack)
        await fixture.ask_python()
        yield fixture
        await fixture.until_idle()


async def check_answer(program: ClientProgram, served: Fixture, case: str, method: str) -> None:
    call = await program.call(method, served.requests[case], timeoutS=60)
    assert call.code is grpc.StatusCode.OK, (case, method, call.details)
    assert candidates_of(call.messages) == served.expected[case], (case, method)
    assert call.messages[-1].usage.completion_tokens or case == "prompts"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", KINDS)
async def test_texts_are_those_of_the_python_client(served: Fixture, kind: str, route: str) -> None:
    """Each library gets each case whole and streamed, over two of the four routes each."""
    require_client(kind)
    turn = KINDS.index(kind) + ROUTES.index(route)
    cases = [(name, METHODS[(turn + n) % 2]) for n, name in enumerate(served.requests)]
    async with running_client(kind, await served.address(route)) as program:
        checks = [check_answer(program, served, case, method) for case, method in cases]
        await asyncio.gather(*checks)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["grpc-js", "connect-node", "go"])
async def test_a_cancel_reaches_the_workers(served: Fixture, kind: str, route: str) -> None:
    request = CASES["greedy"]()
    request.stopping.max_tokens, request.stopping.ignore_eos = 480, True
    async with running_client(kind, await served.address(route)) as program:
        call = await program.call("GenerateStream", request, cancelAfter=2)
        assert call.code is grpc.StatusCode.CANCELLED
        assert len(call.messages) < 480
        await served.until_idle()


@pytest.mark.parametrize("route", ROUTES)
async def test_an_error_through_a_proxy_is_that_of_the_router(served: Fixture, route: str) -> None:
    request = CASES["greedy"]()
    request.sampling.temperature = -1
    async with running_client("grpc-js", await served.address(route)) as program:
        for method in METHODS:
            call = await program.call(method, request)
            assert call.code is grpc.StatusCode.INVALID_ARGUMENT
            assert "temperature is -1" in call.details


async def test_a_client_without_protos(served: Fixture) -> None:
    """The page's command takes all types from the router's reflection."""
    _, built = require_client("connect-node")
    command = code_under("## Try it without code", served.router)["sh"]
    path = f"{built / 'node_modules/.bin'}:{os.environ['PATH']}"
    printed = await printed_by("sh", "-ec", command, folder=served.folder, PATH=path)
    # The model draws its words, the end among them: once in many times it comes before the limit.
    assert re.search('"finishReason": ?"FINISH_REASON_(LENGTH|STOP)"', printed)


async def test_the_example_in_node(served: Fixture, tmp_path: Path) -> None:
    _, built = require_client("grpc-js")
    (tmp_path / "node_modules").symlink_to(built / "node_modules")
    script = tmp_path / "client.mjs"
    script.write_text((EXAMPLES / "node_client" / "client.mjs").read_text())
    printed = await printed_by(
        *("node", script, served.router), folder=tmp_path, PROTOS=str(PROTOS)
    )
    assert re.search("\nfinished: FINISH_REASON_LENGTH\ntokens: 16\n$", printed)


async def test_the_example_in_go(served: Fixture, tmp_path: Path) -> None:
    require_client("go")
    folder = tmp_path / "src/example.com/baton-client"
    shutil.copytree(EXAMPLES / "go_client", folder)
    variables = go_variables(tmp_path)
    await printed_by("sh", "generate.sh", folder=folder, PROTOS=str(PROTOS))
    printed = await printed_by("go", "run", ".", served.router, folder=folder, **variables)
    assert re.search("\nfinished: FINISH_REASON_LENGTH\ntokens: 16\n$", printed)
