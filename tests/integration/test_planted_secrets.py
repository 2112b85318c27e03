"""A cluster with a planted secret in every place where one can stand, and all that it shows."""

import asyncio
import http.client
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import psutil
import pytest

from baton import Client
from baton.common.errors import BatonError
from tests.support.certificates import Authority, write_files
from tests.support.redis_server import RedisServer, running_redis_server
from tests.support.serve_process import ServedCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_BATON = Path(sys.executable).with_name("baton")
_START_S = 120
_PREFIX = "planted"
"""Begins each secret, so that a part of one is found too."""


def planted() -> str:
    return f"{_PREFIX}{secrets.token_hex(12)}"


@dataclass
class Shown:
    """All that a cluster has shown, by where it was seen."""

    texts: dict[str, str] = field(default_factory=dict)

    def add(self, where: str, text: str) -> None:
        self.texts[where] = self.texts.get(where, "") + text

    def assert_without_secrets(self, *known: str) -> None:
        for where, text in self.texts.items():
            for secret in (_PREFIX, *known):
                at = text.find(secret)
                assert at < 0, f"{where} shows a secret: ...{text[max(0, at - 200) : at + 60]}"


@contextmanager
def served(
    log: Path, flags: list[str], variables: Mapping[str, str]
) -> Iterator[tuple[ServedCluster, subprocess.Popen[bytes]]]:
    """Runs `baton serve`, whose output goes to a file."""
    command = [
        *(str(_BATON), "serve", "--port", "0", "--grpc-port", "0", "--metrics-port", "0"),
        *("--num-gpu-blocks-override", "64", "--max-model-len", "512", "--log-level", "debug"),
        *flags,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + _START_S
        while "Ctrl-C" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield ServedCluster(process.pid, log.read_text().splitlines(keepends=True)), process
    finally:
        process.terminate()
        process.wait(30)


def command_lines(pid: int) -> str:
    """What `ps` shows of a process and its children."""
    parent = psutil.Process(pid)
    processes = [parent, *parent.children(recursive=True)]
    return "\n".join(" ".join(process.cmdline()) for process in processes)


def fetch(url: str, path: str, headers: Mapping[str, str], body: object = None) -> tuple[int, str]:
    host = urlsplit(url).netloc
    method, text = ("GET", None) if body is None else ("POST", json.dumps(body))
    headers = {"Content-Type": "application/json", **headers}
    with closing(http.client.HTTPConnection(host, timeout=60)) as connection:
        connection.request(method, path, text, headers)
        answer = connection.getresponse()
        return answer.status, str(answer.getheaders()) + answer.read().decode()


def run(*arguments: str, variables: Mapping[str, str]) -> str:
    result = subprocess.run(
        [str(_BATON), *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return result.stdout + result.stderr


def test_no_secret_is_shown(tmp_path: Path) -> None:
    password, api_key, wrong_key = planted(), planted() * 2, planted()
    with running_redis_server("--requirepass", password) as store:
        address = f"127.0.0.1:{store.port}"
        variables = {
            "BATON_KV_CONNECTOR": f"multi://grpc://,redis://:{password}@{address}/0?timeout_s=1",
            "BATON_API_KEY": api_key,
            "HF_TOKEN": planted(),
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={planted()}",
        }
        shown, log = Shown(), tmp_path / "log"
        with served(log, [], variables) as (cluster, process):
            key = {"Authorization": f"Bearer {api_key}"}
            exercise(cluster, store, shown, key, wrong_key)
            shown.add("ps", command_lines(process.pid))
            shown.add("collect-env", run("collect-env", variables=variables))
            shown.add("collect-env --json", run("collect-env", "--json", variables=variables))
            call = ("--address", cluster.grpc, "--cluster-token-file", cluster.token_file)
            shown.add("baton trace", run("trace", *call, variables={}))
            token = cluster.token
        shown.add("log", log.read_text())
    shown.assert_without_secrets(token)


def exercise(
    cluster: ServedCluster,
    store: RedisServer,
    shown: Shown,
    key: Mapping[str, str],
    wrong_key: str,
) -> None:
    """Asks for right and wrong things, with the store up, down and with another password."""
    wrong = {"Authorization": f"Bearer {wrong_key}"}
    bodies = (
        {"model": "demo", "prompt": "Return the " * 40, "max_tokens": 4},
        {"model": wrong_key, "prompt": 1.5},
        {"model": "demo", "prompt": "a", "temperature": "hot"},
    )
    for step in range(3):
        for headers in (key, wrong, {}):
            for number, body in enumerate(bodies):
                status, text = fetch(cluster.url, "/v1/completions", headers, body)
                # A client's own text may be repeated to it, as the name of a model that is unknown.
                if number != 1:
                    shown.add(f"answer {status} in step {step}", text)
        for path in ("/ready", "/health", "/v1/models", "/openapi.json", "/version"):
            shown.add(path, fetch(cluster.url, path, key)[1])
        for name, target in cluster.targets.items():
            bearer = {"Authorization": f"Bearer {cluster.token}"}
            shown.add(f"metrics of {name}", fetch(f"http://{target}", "/metrics", bearer)[1])
        for given in (wrong_key, None):
            with pytest.raises(BatonError) as caught, Client(cluster.grpc, api_key=given) as client:
                client.generate("Hello", {"max_tokens": 2})
            shown.add("gRPC error", str(caught.value))
        if step == 0:
            store.kill()
        elif step == 1:
            store.start()


@pytest.mark.parametrize("url", ["redis://:{}/x@127.0.0.1:1/0", "redis:/:{}@127.0.0.1"])
def test_a_start_that_fails_shows_no_password(url: str) -> None:
    variables = {"BATON_KV_CONNECTOR": url.format(planted())}
    text = run("serve", "--port", "0", "--grpc-port", "0", variables=variables)
    assert text.strip()
    Shown({"serve": text}).assert_without_secrets()


async def test_keys_and_certificates_that_are_bad_are_not_quoted(tmp_path: Path) -> None:
    """Files whose content is a secret, at the flags of all kinds of credentials."""
    authority = Authority()
    files = write_files(tmp_path / "router", authority.issue("router"), authority.certificate)
    bad = tmp_path / "bad"
    bad.write_text(f"{planted()}\n")
    flags = {
        "certfile": ["--ssl-certfile", str(bad), "--ssl-keyfile", files.keyfile],
        "keyfile": ["--ssl-certfile", files.certfile, "--ssl-keyfile", str(bad)],
        "ca-certs": [
            *("--ssl-certfile", files.certfile, "--ssl-keyfile", files.keyfile),
            *("--ssl-ca-certs", str(bad), "--ssl-cert-reqs", "required"),
        ],
        "tenants": ["--tenants", str(bad)],
        "jwks": ["--jwks-file", str(bad)],
    }
    outputs = await asyncio.gather(
        *(
            asyncio.to_thread(run, "serve", "--port", "0", "--grpc-port", "0", *given, variables={})
            for given in flags.values()
        )
    )
    shown = Shown(dict(zip(flags, outputs, strict=True)))
    assert all(text.strip() for text in outputs)
    shown.assert_without_secrets()


def test_a_call_with_a_bad_credential_is_not_quoted_by_workers(tmp_path: Path) -> None:
    secret, log = planted(), tmp_path / "log"
    with served(log, [], {}) as (cluster, _):
        (worker,) = re.findall(r"^decode-0 +(127\S+)$", log.read_text(), re.MULTILINE)
        with grpc.insecure_channel(worker) as channel:
            call = channel.unary_unary("/baton.v1.WorkerService/GetInfo")
            metadata = (("authorization", f"Bearer {secret}"),)
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=20, metadata=metadata)
    shown = Shown({"error": str(caught.value), "log": log.read_text()})
    shown.assert_without_secrets(cluster.token)
