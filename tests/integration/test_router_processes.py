"""A router of several processes at the same ports."""

import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from baton.v1 import cluster_pb2
from tests.support.router_processes import running_router_processes, until
from tests.support.tenants import KEY, entry_of, write_tenants

COMPLETION = {"model": "demo_model", "prompt": "a list", "max_tokens": 2, "temperature": 0}
_DONE = "baton_router_requests_total"


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    folder = tmp_path_factory.mktemp("router")
    flags = ("--metrics-port", "0", "--max-concurrent-requests", "6")
    with running_router_processes(folder, *flags) as running:
        until(lambda: all(is_ready(running) for _ in range(20)))
        yield running


def is_ready(router) -> bool:
    """Whether a new connection meets a process that can serve."""
    try:
        return httpx2.get(f"http://{router.http}/ready", timeout=10).is_success
    except httpx2.TransportError:
        return False


def complete(router, *, key=None, request_id=None, **fields) -> httpx2.Response:
    """Sends a request on a connection of its own."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    headers |= {"X-Request-Id": request_id} if request_id else {}
    url = f"http://{router.http}/v1/completions"
    return httpx2.post(url, json=COMPLETION | fields, headers=headers, timeout=30)


def read_metrics(router) -> str:
    answer = httpx2.get(f"http://{router.http}/metrics", timeout=10)
    assert answer.status_code == 200
    return answer.text


def counts(text: str) -> Counter[str]:
    pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    values = {name: float(value) for name, _, value in pairs}
    kept = ("_total", "_count", "_sum", "_bucket")
    return Counter(
        {
            name: value
            for name, value in values.items()
            if name.startswith("baton_router_") and name.partition("{")[0].endswith(kept)
        }
    )


def num_done(text: str) -> float:
    return sum(value for name, value in counts(text).items() if name.startswith(_DONE))


def test_requests_are_spread_and_everything_counts_them_all(router):
    before = num_done(read_metrics(router))
    for number in range(24):
        assert complete(router, request_id=f"spread-{number}").is_success
    ended = router.num_ended()
    assert min(ended[0], ended[1]) > 0
    text = read_metrics(router)
    assert num_done(text) == before + 24
    assert 'process_resident_memory_bytes{process="1"}' in text
    (replicas,) = (
        line
        for line in text.splitlines()
        if 'state="ready",tier="decode"' in line or 'tier="decode",state="ready"' in line
    )
    assert replicas.endswith(" 1.0")
    with router.operators() as operators:
        cluster = operators.GetCluster(cluster_pb2.GetClusterRequest(), timeout=10)
        assert cluster.num_processes == 2
        assert sum(cluster.activity.finished.values()) == sum(ended.values())
        assert cluster.activity.first_token.count >= 24
        for number in range(24):
            request = cluster_pb2.GetTraceRequest(request_id=f"spread-{number}")
            (trace,) = operators.GetTrace(request, timeout=10).traces
            assert trace.outcome == "length"
        latest = operators.GetTrace(cluster_pb2.GetTraceRequest(limit=24), timeout=10).traces
        expected = [f"spread-{number}" for number in reversed(range(24))]
        assert [trace.request_id for trace in latest] == expected


def test_the_limit_of_requests_is_that_of_all_processes(router):
    """Twelve requests at once, of which each process alone would take all that come to it."""
    with ThreadPoolExecutor(12) as threads:
        statuses = list(threads.map(lambda _: complete(router, max_tokens=200), range(12)))
    codes = Counter(answer.status_code for answer in statuses)
    assert codes[200] >= 6
    assert set(codes) <= {200, 429, 503}
    with ThreadPoolExecutor(6) as threads:  # nothing is left counted
        answers = list(threads.map(lambda _: complete(router, max_tokens=50), range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6


def test_a_killed_process_returns_while_others_serve_and_no_count_goes_back(router):
    before = counts(read_metrics(router))
    killed = router.children[0]
    killed.kill()
    until(lambda: not killed.is_running() or killed.status() == "zombie")
    served = Counter(complete(router).status_code for _ in range(10))
    assert served == {200: 10}
    during = counts(read_metrics(router))
    until(lambda: len(router.num_ended()) == 2)
    until(lambda: all(is_ready(router) for _ in range(20)))
    numbers_before = router.num_ended()
    until(lambda: complete(router).is_success and router.num_ended()[0] > numbers_before[0])
    after = counts(read_metrics(router))
    assert all(during[name] >= value for name, value in before.items())
    assert all(after[name] >= value for name, value in during.items())
    assert sum(v for n, v in during.items() if n.startswith(_DONE)) >= 10 + sum(
        v for n, v in before.items() if n.startswith(_DONE)
    )


def test_a_port_in_use_is_refused_in_one_line(router):
    command = [sys.executable, "-P", "-m", "baton.cli.router", "--processes", "2"]
    command += ["--model", "demo", "--decode", "127.0.0.1:1", "--grpc-port", "none"]
    port = router.http.rpartition(":")[2]
    ended = subprocess.run(
        [*command, "--port", port], check=False, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(
        f"baton router: error: cannot listen on 127.0.0.1:{port}: Address already in use"
    )


def test_limits_of_a_client_hold_for_all_processes_and_a_signal_drains_all(tmp_path):
    path = write_tenants(
        tmp_path, entry_of("a", KEY, requests_per_minute=16, max_concurrent_requests=9)
    )
    with running_router_processes(tmp_path, "--tenants", path) as router:
        until(lambda: all(is_ready(router) for _ in range(20)))
        streams, first_tokens = [], threading.Barrier(9)

        def stream() -> str:
            body = COMPLETION | {"stream": True, "max_tokens": 300}
            url, headers = f"http://{router.http}/v1/completions", {"x-api-key": KEY}
            text = ""
            with httpx2.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
                for piece in answer.iter_text():
                    if not text:
                        first_tokens.wait(30)
                    text += piece
            return text

        with ThreadPoolExecutor(8) as threads:
            streams = [threads.submit(stream) for _ in range(8)]
            first_tokens.wait(30)  # all of them run
            codes = Counter(complete(router, key=KEY).status_code for _ in range(12))
            assert codes == {200: 8, 429: 4}  # 16 in a minute, 8 of which are the streams
            router.process.send_signal(signal.SIGTERM)
            texts = [one.result() for one in streams]
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        assert router.process.wait(30) == 0
