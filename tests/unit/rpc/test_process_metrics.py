"""`ProcessMetrics`: the event loop's lag, certificates and the build."""

import asyncio
import time
from datetime import timedelta

from prometheus_client import CollectorRegistry, generate_latest

from baton.common.security.certificates import Certificates
from rpc import process_metrics
from rpc.process_metrics import ProcessMetrics
from tests.support.certificates import Authority, write_files

LAG = "baton_process_event_loop_lag_seconds"


def test_a_blocked_event_loop_is_late(monkeypatch):
    monkeypatch.setattr(process_metrics, "_LAG_INTERVAL_S", 0.001)
    metrics = ProcessMetrics({})

    async def block() -> None:
        measuring = asyncio.create_task(metrics.measure_lag())
        await asyncio.sleep(0)
        time.sleep(0.05)  # noqa: ASYNC251 - blocks the loop on purpose
        async with asyncio.timeout(10):
            while not sum(metrics.snapshot().histograms[LAG,].counts):  # noqa: ASYNC110
                await asyncio.sleep(0)
        measuring.cancel()

    asyncio.run(block())
    assert metrics.snapshot().histograms[LAG,].total >= 0.04


def test_certificates_and_their_expiry(tmp_path):
    authority = Authority()
    leaf = authority.issue("leaf", expires_in=timedelta(days=3))
    certificates = Certificates(write_files(tmp_path, leaf, authority.certificate))
    values = ProcessMetrics({"cluster": certificates, "clients": None}).snapshot().values
    left_s = values["baton_process_certificate_expiry_seconds", "cluster"] - time.time()
    assert abs(left_s - 3 * 86400) < 3600
    assert ("baton_process_certificate_expiry_seconds", "clients") not in values


def test_the_build_and_the_process_are_exported():
    registry = CollectorRegistry()
    ProcessMetrics({}).register(registry)
    text = generate_latest(registry).decode()
    assert 'baton_process_build_info{python="3.' in text
    assert "\nprocess_resident_memory_bytes " in text
    assert "\npython_gc_collections_total" in text
