"""Answers are as the OpenAPI document declares them, to right and wrong requests.

schemathesis makes the requests from the document. Requests that fit a schema may still be
refused: it states types, and the limits that depend on each other are in the server alone.
"""

import asyncio
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.fuzzed_router import fuzzed_router

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import positive_data_acceptance


class ServedRouter:
    """A router that runs in a thread.

    Attributes:
        url: its HTTP address.
        failure: why it failed; None if it did not.
    """

    def __init__(self) -> None:
        self.url = ""
        self.failure: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._stop: Any = None

    def __enter__(self) -> "ServedRouter":
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()
        self._thread.join(60)

    async def _run(self) -> None:
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stopped.set)
        async with fuzzed_router() as router:
            self.url = router.http_server.url
            self._started.set()
            await stopped.wait()
            try:
                await router.check_health()
            except BaseException as error:
                self.failure = error


@pytest.fixture(scope="module")
def served() -> Iterator[ServedRouter]:
    with ServedRouter() as router:
        yield router
    if router.failure is not None:
        raise router.failure


def check_operations(served: ServedRouter, num_examples: int) -> None:
    """Sends requests to all endpoints, right and wrong ones."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        check_operation(operation, GenerationMode.POSITIVE, num_examples)
        if operation.body:
            check_operation(operation, GenerationMode.NEGATIVE, num_examples)


def check_operation(operation: Any, mode: GenerationMode, num_examples: int) -> None:
    excluded = [positive_data_acceptance]
    if operation.path == "/v1/embeddings":
        excluded.append(not_a_server_error)

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        case.validate_response(case.call(), excluded_checks=excluded)

    check()


def test_answers_are_as_declared(served):
    check_operations(served, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_answers_are_as_declared(served):
    check_operations(served, 12)
