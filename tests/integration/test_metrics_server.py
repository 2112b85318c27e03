import argparse
import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from baton.errors import ConfigurationError
from baton.flags import add_flags, config_from_args
from baton.metrics_collector import MetricsCollector
from kvstore.metrics import KvMetrics
from rpc.metrics_server import MetricsConfig, serving_metrics


def _config(*flags: str) -> MetricsConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, MetricsConfig, "metrics")
    return config_from_args(MetricsConfig, parser.parse_args(flags))


def _read(port: int | None) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return response.read().decode()


def test_metrics_are_served_at_a_free_port_and_no_longer_once_closed(caplog):
    caplog.set_level("INFO")
    metrics, registry = KvMetrics(), CollectorRegistry()
    registry.register(MetricsCollector(metrics))
    metrics.of("shm").called("load", 0.01, 2, 2048)
    with serving_metrics(_config("--metrics-port", "0"), registry) as port:
        assert f"url=http://127.0.0.1:{port}/metrics" in caplog.text
        families = {family.name for family in text_string_to_metric_families(_read(port))}
        assert "baton_kv_bytes" in families
        assert 'baton_kv_bytes_total{backend="shm",direction="load"} 2048.0' in _read(port)
    with pytest.raises(urllib.error.URLError):
        _read(port)


def test_a_client_that_sends_nothing_is_disconnected(monkeypatch, capsys):
    monkeypatch.setattr("rpc.metrics_server._CLIENT_TIMEOUT_S", 0.1)
    with (
        serving_metrics(_config("--metrics-port", "0"), CollectorRegistry()) as port,
        socket.create_connection(("127.0.0.1", port), timeout=10) as client,
    ):
        assert client.recv(1) == b""
        assert _read(port) == ""
    assert capsys.readouterr().err == ""


def test_no_server_is_started_without_a_port():
    before = threading.active_count()
    with serving_metrics(_config(), CollectorRegistry()) as port:
        assert port is None
        assert threading.active_count() == before


def test_a_port_in_use_is_a_configuration_error():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = _config("--metrics-port", str(port))
        with (
            pytest.raises(ConfigurationError, match=f"metrics on 127.0.0.1:{port}"),
            serving_metrics(config, CollectorRegistry()),
        ):
            pass


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_out_of_range_is_refused(port):
    with pytest.raises(ConfigurationError, match="--metrics-port"):
        _config("--metrics-port", port)
