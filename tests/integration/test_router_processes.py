"""A router of several processes at the same ports."""

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx2
import pytest

from baton.v1 import cluster_pb2
from tests.support.router_processes import running_router_processes, until
from tests.support.tenants import KEY, OTHER_KEY, entry_of, write_tenants

COMPLETION = {"model": "demo_model", "prompt": "a list", "max_tokens": 2, "temperature": 0}
_DONE = "baton_router_requests_total"


TOKEN = "the-token-of-this-test"
OPERATOR = (("authorization", f"Bearer {TOKEN}"),)
MAX_PER_MINUTE = 16
# Each would read the certificates of the system, which takes longer than a short answer: limits of
# rates and of requests at the same time need calls that come soon after one another.
get, post, stream_answer = (
    partial(call, verify=False) for call in (httpx2.get, httpx2.post, httpx2.stream)
)

pytestmark = pytest.mark.xdist_group("router-processes")


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    """One router for the tests of this module; the last one ends it."""
    folder = tmp_path_factory.mktemp("router")
    limited = entry_of("limited", OTHER_KEY, requests_per_minute=MAX_PER_MINUTE)
    tenants = write_tenants(folder, entry_of("free", KEY), limited)
    flags = ("--tenants", tenants, "--max-concurrent-requests", "10")
    with running_router_processes(folder, *flags, token=TOKEN) as running:
        yield running


def is_ready(router) -> bool:
    """Whether a new connection meets a process that can serve."""
    try:
        return get(f"http://{router.http}/ready", timeout=10).is_success
    except httpx2.TransportError:
        return False


def complete(router, *, key=KEY, request_id=None, **fields) -> httpx2.Response:
    """Sends a request on a connection of its own."""
    headers = {"x-api-key": key} | ({"X-Request-Id": request_id} if request_id else {})
    url = f"http://{router.http}/v1/completions"
    return post(url, json=COMPLETION | fields, headers=headers, timeout=30)


def read_metrics(router) -> str:
    headers = dict(OPERATOR)
    answer = get(f"http://{router.http}/metrics", headers=headers, timeout=10)
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
        cluster = operators.GetCluster(
            cluster_pb2.GetClusterRequest(), timeout=10, metadata=OPERATOR
        )
        assert cluster.num_processes == 2
        assert sum(cluster.activity.finished.values()) == sum(ended.values())
        assert cluster.activity.first_token.count >= 24
        for number in range(24):
            request = cluster_pb2.GetTraceRequest(request_id=f"spread-{number}")
            (trace,) = operators.GetTrace(request, timeout=10, metadata=OPERATOR).traces
            assert trace.outcome == "length"
        latest = cluster_pb2.GetTraceRequest(limit=24)
        traces = operators.GetTrace(latest, timeout=10, metadata=OPERATOR).traces
        expected = [f"spread-{number}" for number in reversed(range(24))]
        assert [trace.request_id for trace in traces] == expected


def test_the_pages_state_is_that_of_all_processes(router):
    ids = [f"shown-{number}" for number in range(8)]
    for request_id in ids:
        assert complete(router, request_id=request_id).is_success
    url = f"http://{router.http}/status"
    assert get(url, headers={"x-api-key": KEY}, timeout=10).status_code == 401
    state = get(url, headers=dict(OPERATOR), timeout=10).json()
    assert state["cluster"]["num_processes"] == 2
    assert set(ids) <= {trace["request_id"] for trace in state["recent"]}
    totals = [trace["total_ms"] for trace in state["slowest"]]
    assert len(totals) >= len(ids)
    assert totals == sorted(totals, reverse=True)


def test_the_limit_of_requests_is_that_of_all_processes(router):
    """Each process alone would take as many of the thirty, up to the share of one client."""
    with ThreadPoolExecutor(30) as threads:
        answers = list(threads.map(lambda _: complete(router, max_tokens=1000), range(30)))
    codes = Counter(answer.status_code for answer in answers)
    assert set(codes) == {200, 503}
    assert codes[200] <= 10  # the first end after five seconds, when all have come
    refused = next(answer for answer in answers if answer.status_code == 503)
    assert "--max-concurrent-requests" in refused.text
    with ThreadPoolExecutor(6) as threads:  # nothing is left counted
        answers = list(threads.map(lambda _: complete(router, max_tokens=20), range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6


def test_a_killed_process_returns_while_others_serve_and_no_count_goes_back(router):
    before = counts(read_metrics(router))
    killed = router.children[0]
    killed.kill()
    until(lambda: not killed.is_running())  # a zombie may have threads, which hold its sockets
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


def test_limits_of_a_client_hold_for_all_processes(router):
    began_at = time.monotonic()
    answers = [complete(router, key=OTHER_KEY) for _ in range(MAX_PER_MINUTE + 4)]
    num_flown_in = int((time.monotonic() - began_at) * MAX_PER_MINUTE / 60)
    codes = Counter(answer.status_code for answer in answers)
    assert codes[429] >= 4 - num_flown_in  # of a slow machine
    assert codes[200] >= MAX_PER_MINUTE
    assert set(codes) == {200, 429}


def test_a_signal_drains_all_processes(router):
    have_begun = threading.Barrier(9)

    def stream() -> str:
        body = COMPLETION | {"stream": True, "max_tokens": 200}
        url, headers, text = f"http://{router.http}/v1/completions", {"x-api-key": KEY}, ""
        with stream_answer("POST", url, json=body, headers=headers, timeout=60) as answer:
            for piece in answer.iter_text():
                if not text:
                    have_begun.wait(30)
                text += piece
        return text

    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(stream) for _ in range(8)]
        have_begun.wait(30)
        router.process.send_signal(signal.SIGTERM)
        texts = [one.result() for one in streams]
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert router.process.wait(30) == 0
