"""Logs as JSON, and `baton trace`, of a cluster of real processes."""

import asyncio
import json
import os
import sys

import httpx2
import pytest

from baton.client import AsyncClient
from tests.support.checkpoints import tiny_checkpoint
from tests.support.cluster import REPOSITORY, WORKER_CALL, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TOKEN = WORKER_CALL[0][1].removeprefix("Bearer ")
PROMPT = list(range(5, 85))


async def test_every_line_is_json_and_has_the_ids_of_its_request(tmp_path):
    flags = ("--log-format=json", "--log-level=debug")
    async with running_cluster(
        tmp_path,
        model=tiny_checkpoint("llama"),
        kv_connector=f"file://{tmp_path}/kv",
        worker_flags=flags,
        router_flags=("--max-local-prefill-tokens=0", *flags),
        http=True,
    ) as cluster:
        async with httpx2.AsyncClient(base_url=cluster.http_url, timeout=60, verify=False) as http:
            answer = await http.post(
                "/v1/completions",
                json={"prompt": PROMPT, "max_tokens": 4, "temperature": 0},
                headers={"x-request-id": "by-http", "traceparent": PARENT},
            )
            assert answer.status_code == 200
        async with AsyncClient(cluster.router.address) as client:
            params = {"max_tokens": 4, "temperature": 0}
            await client.generate(PROMPT, params, request_id="by-grpc")
        address = ("--address", cluster.router.address)
        shown, listed, missing, refused = await asyncio.gather(
            baton(TOKEN, "trace", "by-grpc", *address),
            baton(TOKEN, "trace", *address),
            baton(TOKEN, "trace", "never", *address),
            baton("", "trace", *address),
        )
        assert [worker.stop() for worker in (cluster.router, *cluster.workers)] == [0, 0, 0]
        lines = {name: parsed(cluster, name) for name in ("router", "prefill", "decode")}
    calls = [line for line in lines["router"] if line["message"].startswith("call ")]
    (by_http,) = (line for line in calls if line.get("path") == "/v1/completions")
    assert (by_http["request_id"], by_http["status"]) == ("by-http", 200)
    assert by_http["trace_id"] == PARENT[3:35]
    (by_grpc,) = (line for line in calls if line.get("method", "").endswith("/Generate"))
    assert by_grpc["request_id"] == "by-grpc"
    assert (by_grpc["code"], by_grpc["level"]) == ("OK", "info")
    prefills = [line for line in lines["prefill"] if line.get("method", "").endswith("/Prefill")]
    assert [line["request_id"].partition("/")[0] for line in prefills] == ["by-http", "by-grpc"]
    assert prefills[0]["trace_id"] == PARENT[3:35]
    polls = ("GetLoad", "WatchLoad", "GetInfo", "WatchKvEvents")
    assert not [
        line
        for line in lines["decode"]
        if line["level"] != "debug" and line.get("method", "").endswith(polls)
    ]
    assert (shown[0], listed[0]) == (0, 0), shown[2] + listed[2]
    assert all(name in shown[1] for name in ("route", "prefill", "transfer", "decode"))
    assert max(map(len, shown[1].splitlines())) <= 80
    assert "by-http" in listed[1]
    assert missing[:2] == (1, "")
    assert "no record of request 'never'" in missing[2]
    assert refused[0] == 1
    assert "credential" in refused[2]


def parsed(cluster, name):
    server = cluster.router if name == "router" else getattr(cluster, name)[0]
    lines = [json.loads(line) for line in server.log().splitlines()]
    assert lines
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    return lines


async def baton(token, *arguments):
    """Runs a command with the cluster's token; returns its exit status and what it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", "from baton.cli import main; raise SystemExit(main())", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
        env={**os.environ, "BATON_CLUSTER_TOKEN": token},
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()
