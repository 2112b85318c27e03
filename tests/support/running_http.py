"""The HTTP server of a whole router in this process, and clients of it."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from openai import AsyncOpenAI

from router.config.http import HttpConfig
from tests.support.fake_workers import FakeWorker, running_workers
from tests.support.running_router import RunningRouter, running_router


class RunningHttp:
    """The HTTP server of a router, and two clients: OpenAI's, and one that sends anything."""

    def __init__(self, router: RunningRouter) -> None:
        server = router.service.http
        assert server is not None
        self.server = server
        self.router = router
        self.url = f"http://{server.address}"
        # Reading the certificates of the system would take longer than most tests.
        self.http = httpx2.AsyncClient(base_url=self.url, timeout=30, verify=False)
        self.openai = AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=self.http
        )

    async def close(self) -> None:
        await self.http.aclose()


@asynccontextmanager
async def running_http(
    *workers: FakeWorker, http: Mapping[str, Any] | None = None, **config: Any
) -> AsyncIterator[RunningHttp]:
    """Runs workers, a router and its HTTP server.

    Args:
        workers: the workers.
        http: fields of `HttpConfig`.
        config: as `running_router` takes it.
    """
    config["http"] = HttpConfig(**(http or {}))
    async with running_workers(*workers), running_router(*workers, **config) as router:
        running = RunningHttp(router)
        try:
            yield running
        finally:
            await running.close()
