"""The port for metrics: what it serves, to whom, and what it withstands."""

import argparse
import os
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import add_flags, config_from_args
from baton.common.observe.metrics_collector import MetricsCollector
from baton.common.security.cluster import ClusterSecurity
from engine.metrics.counts import EngineMetrics
from engine.metrics.export import EngineDescription, EngineExport
from engine.request import EngineLoad
from kvstore.guard.metrics import KvMetrics
from rpc.metrics_server import MetricsAccess, serving_metrics
from rpc.process_metrics import ProcessMetrics
from rpc.server_config import MetricsConfig
from tests.support.certificates import Authority, write_files

TOKEN = "cluster-token-of-these-tests"


def _config(*flags: str) -> MetricsConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, MetricsConfig, "metrics")
    return config_from_args(MetricsConfig, parser.parse_args(flags))


def _read(port: int | None, token: str | None = None, path: str = "/metrics") -> str:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read().decode()


def _open(config: MetricsConfig, registry: CollectorRegistry, token: str | None = None):
    return serving_metrics(config, registry, MetricsAccess(config, ClusterSecurity(token=token)))


def _registry(*sources) -> CollectorRegistry:
    registry = CollectorRegistry()
    for source in sources:
        registry.register(MetricsCollector(source))
    return registry


def _status(port: int | None, token: str | None = None, path: str = "/metrics") -> int:
    """The status of an answer; a refusal holds no metrics, and says what it lacks."""
    refusal = None
    try:
        _read(port, token, path)
    except urllib.error.HTTPError as error:
        refusal = error
    if refusal is None:
        return 200
    with refusal:
        assert refusal.code != 401 or refusal.headers["WWW-Authenticate"].startswith("Bearer ")
        assert b"baton_" not in refusal.read()
    return refusal.code


def test_metrics_are_served_at_a_free_port_and_no_longer_once_closed(caplog):
    caplog.set_level("INFO")
    metrics, registry = KvMetrics(), CollectorRegistry()
    registry.register(MetricsCollector(metrics))
    metrics.of("shm").called("load", 0.01, 2, 2048)
    with _open(_config("--metrics-port", "0"), registry) as port:
        assert f"url=http://127.0.0.1:{port}/metrics" in caplog.text
        families = {family.name for family in text_string_to_metric_families(_read(port))}
        assert "baton_kv_bytes" in families
        assert 'baton_kv_bytes_total{backend="shm",direction="load"} 2048.0' in _read(port)
    with pytest.raises(urllib.error.URLError):
        _read(port)


def test_a_client_that_sends_nothing_is_disconnected(monkeypatch, capsys):
    with _open(_config("--metrics-port", "0"), CollectorRegistry()) as port:
        with monkeypatch.context() as patient:
            patient.setattr("rpc.metrics_server._CLIENT_TIMEOUT_S", 0.1)
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                assert client.recv(1) == b""
        assert _read(port) == ""
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_client_that_sends_a_byte_now_and_then_is_disconnected(monkeypatch, tmp_path, has_tls):
    monkeypatch.setattr("rpc.metrics_server._CLIENT_TIMEOUT_S", 60.0)
    monkeypatch.setattr("rpc.metrics_server._MAX_CONNECTION_S", 0.3)
    authority = Authority()
    files = write_files(tmp_path, authority.issue(), authority.certificate) if has_tls else None
    config = _config("--metrics-port", "0")
    access = MetricsAccess(config, ClusterSecurity())
    with (
        serving_metrics(config, CollectorRegistry(), access, files) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as client,
    ):
        client.sendall(b"\x16" if has_tls else b"G")  # how a handshake, or a request, begins
        assert client.recv(1) == b""


def test_no_server_is_started_without_a_port():
    before = set(threading.enumerate())  # some may end meanwhile
    with _open(_config(), CollectorRegistry()) as port:
        assert port is None
        assert set(threading.enumerate()) <= before


def test_a_port_in_use_is_a_configuration_error():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = _config("--metrics-port", str(port))
        with (
            pytest.raises(ConfigurationError, match=f"metrics on 127.0.0.1:{port}"),
            _open(config, CollectorRegistry()),
        ):
            pass


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_out_of_range_is_refused(port):
    with pytest.raises(ConfigurationError, match="--metrics-port"):
        _config("--metrics-port", port)


def test_without_a_token_all_may_read_and_only_the_metrics():
    with _open(_config("--metrics-port", "0"), _registry(KvMetrics())) as port:
        assert _status(port) == 200
        assert [_status(port, path=path) for path in ("/", "/metrics/", "/x")] == [404] * 3


def test_the_token_of_the_cluster_is_asked_for():
    with _open(_config("--metrics-port", "0"), _registry(KvMetrics()), TOKEN) as port:
        assert [_status(port), _status(port, TOKEN[:-1]), _status(port, TOKEN)] == [401, 401, 200]
        assert _status(port, path="/") == 404


def test_a_token_for_metrics_replaces_that_of_the_cluster(tmp_path):
    file = tmp_path / "token"
    file.write_text("metrics-token-of-these-tests\n")
    config = _config("--metrics-port", "0", "--metrics-token-file", str(file))
    with _open(config, _registry(KvMetrics()), TOKEN) as port:
        assert _status(port, "metrics-token-of-these-tests") == 200
        assert _status(port, TOKEN) == 401
        file.write_text("another-token-of-these-tests\n")
        os.utime(file, ns=(1, 1))
        assert _status(port, "metrics-token-of-these-tests") == 401
        assert _status(port, "another-token-of-these-tests") == 200


@pytest.mark.parametrize("content", [None, "", "short"])
def test_a_bad_token_file_is_refused_by_its_flag(tmp_path, content):
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    config = _config("--metrics-token-file", str(file))
    with pytest.raises(ConfigurationError, match="--metrics-token-file") as caught:
        MetricsAccess(config, ClusterSecurity())
    assert content is None or not content or content not in caught.value.message.split(str(file))[1]


def test_without_any_token_a_process_whose_clients_need_keys_shows_no_metrics():
    access = MetricsAccess(MetricsConfig(), ClusterSecurity(), has_clients=True)
    assert not access.admits(None)
    assert not access.admits("Bearer x")


def test_a_port_with_tls_is_not_held_up_by_a_silent_client(tmp_path, monkeypatch):
    monkeypatch.setattr("rpc.metrics_server._CLIENT_TIMEOUT_S", 5.0)
    config = _config("--metrics-port", "0")
    access = MetricsAccess(config, ClusterSecurity())
    authority = Authority()
    files = write_files(tmp_path, authority.issue(), authority.certificate)
    trusted = ssl.create_default_context(cadata=authority.certificate.decode())
    trusted.check_hostname = False
    with (
        serving_metrics(config, _registry(KvMetrics()), access, files) as port,
        socket.create_connection(("127.0.0.1", port), timeout=10),
        urllib.request.urlopen(f"https://127.0.0.1:{port}/metrics", context=trusted) as response,
    ):
        assert b"baton_kv_bytes" in response.read()


def test_more_connections_than_the_limit_are_closed(monkeypatch):
    monkeypatch.setattr("rpc.metrics_server._MAX_CONNECTIONS", 1)
    with (
        _open(_config("--metrics-port", "0"), CollectorRegistry()) as port,
        socket.create_connection(("127.0.0.1", port), timeout=10) as first,
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as second:
            assert second.recv(1) == b""
        first.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert first.recv(12) == b"HTTP/1.0 200"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_metrics():
    engine, transfers = EngineMetrics(), KvMetrics()
    transfers.of("redis").called("load", 0.01, 2, 2048)
    load = EngineLoad(
        num_running=1, num_waiting=0, num_queued_tokens=0, num_free_blocks=1, num_blocks=2
    )
    labels = EngineDescription(model="a", block_size=4, kv_dtype="float32", caches_prefixes=True)
    registry = _registry(transfers, EngineExport(engine, lambda: load, labels))
    ProcessMetrics({}).register(registry)
    with _open(_config("--metrics-port", "0"), registry) as port:
        text = _read(port)
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
