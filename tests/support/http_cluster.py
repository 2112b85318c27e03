"""A cluster of real processes on the demo model, with HTTP, and the official clients of it.

The clients are imported when a cluster starts: that takes two seconds of a core, and every
selection of tests imports this module.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from baton.common.model_files.named_models import demo_model_path
from tests.support.cluster import Cluster, running_cluster

MODEL = "tiny"
ROUTER_FLAGS = (
    "--max-local-prefill-tokens=0",
    "--tool-call-parser=hermes",
    "--port=0",
)


class HttpCluster:
    """A cluster and its clients.

    Attributes:
        cluster: the processes.
        url: of the HTTP server.
        http: sends anything.
        openai: OpenAI's client.
        anthropic: Anthropic's client.
    """

    def __init__(self, cluster: Cluster, url: str) -> None:
        import anthropic
        import httpx2
        import openai

        self.cluster, self.url = cluster, url
        # Reading the certificates of the system would take longer than most tests.
        self.http = httpx2.AsyncClient(base_url=url, timeout=60, verify=False)
        self.openai = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=self.http
        )
        self.anthropic = anthropic.AsyncAnthropic(
            base_url=url, api_key="none", max_retries=0, http_client=self.http
        )

    async def close(self) -> None:
        await self.http.aclose()


@asynccontextmanager
async def running_http_cluster(
    folder: Path,
    *,
    model: Path | str | None = None,
    worker_flags: Sequence[str] = (),
    router_flags: Sequence[str] = (),
) -> AsyncIterator[HttpCluster]:
    """Starts a router, one prefill and one decode worker, with a parser of tool calls.

    Args:
        folder: gets logs and the KV store.
        model: the model; None: the demo model.
        worker_flags: further flags of both workers.
        router_flags: further flags of the router.
    """
    port_file = folder / "http.port"
    async with running_cluster(
        folder,
        model=model or demo_model_path(),
        kv_connector=f"file://{folder}/kv",
        worker_flags=worker_flags,
        router_flags=(*ROUTER_FLAGS, *router_flags, f"--port-file={port_file}"),
    ) as cluster:
        running = HttpCluster(cluster, f"http://127.0.0.1:{port_file.read_text().strip()}")
        try:
            yield running
        finally:
            await running.close()
