"""`/metrics` of the router's HTTP server."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton.common.observe.metrics_collector import MetricsCollector
from kvstore.guard.metrics import KvMetrics
from router.config.http import HttpConfig
from router.config.tenants import TenantsConfig
from router.http.app import build_app
from router.tenants.tenants import Tenants
from rpc.logs import CURRENT_CALL
from tests.support.asgi_calls import Answer, call_app
from tests.support.odd_requests import OddRequest


async def scrape(*headers: tuple[bytes, bytes]) -> Answer:
    registry = CollectorRegistry()
    registry.register(MetricsCollector(KvMetrics()))
    tenants = Tenants(TenantsConfig(api_key=("a-key-of-this-test",)))

    async def read_metrics() -> bytes:
        return generate_latest(registry)

    def admits_reader(header: str | None) -> bool:
        return header == "Bearer right"

    app = build_app((), HttpConfig(), tenants, read_metrics, admits_reader)
    return await call_app(app, OddRequest("GET", "/metrics", headers=headers))


async def test_the_token_for_metrics_opens_them():
    answer = await scrape((b"authorization", b"Bearer right"))
    assert answer.status == 200
    assert answer.content_type == "text/plain"
    assert b"# TYPE baton_kv_bytes_total counter" in answer.body


@pytest.mark.parametrize("headers", [(), ((b"authorization", b"Bearer a-key-of-this-test"),)])
async def test_others_get_none_whatever_key_they_have(headers):
    answer = await scrape(*headers)
    assert (answer.status, answer.body) == (401, b"")
    assert answer.headers[b"www-authenticate"].startswith(b"Bearer ")


async def test_what_follows_a_request_is_no_part_of_it():
    """Its id would be in lines that are not about it."""
    await scrape()
    assert CURRENT_CALL.get() is None
