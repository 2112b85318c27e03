"""A loaded cluster, scraped by a real Prometheus with Baton's own alerts and dashboard."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engine.metrics import METRICS as ENGINE
from engine.metrics_export import VLLM_METRICS
from kvstore.metrics import METRICS as TRANSFERS
from router.metrics import METRICS as ROUTER
from rpc.process_metrics import METRICS as PROCESS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

DEPLOY = Path(__file__).parents[2] / "deploy" / "observability"
DEADLINE_S = 120.0
SCRAPES = 8


class Scraped:
    """A cluster, and the Prometheus that scrapes it.

    Attributes:
        url: of the router's HTTP API.
        token: the cluster's.
        targets: addresses of metrics by job.
        prometheus: its base URL.
    """

    def __init__(self, lines: list[str]) -> None:
        text = "".join(lines)
        (self.url,) = re.findall(r"^http +(\S+)$", text, re.MULTILINE)
        (path,) = re.findall(r"^token +(\S+)$", text, re.MULTILINE)
        self.token_file, self.token = path, Path(path).read_text().strip()
        shown = re.findall(r"^metrics +http://(\S+)/metrics of (\w+)", text, re.MULTILINE)
        self.targets = {f"baton-{name}": address for address, name in shown}
        self.prometheus = ""

    def ask(self, path: str, **query: str) -> Any:
        url = f"{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)["data"]


@contextlib.contextmanager
def running(command: list[Any], **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    lines: list[str] = []
    assert process.stdout is not None
    while text not in (lines[-1] if lines else ""):
        line = process.stdout.readline()
        assert line, "".join(lines)
        lines.append(line)
    return lines


def config_of(scraped: Scraped) -> dict[str, Any]:
    authorization = {"credentials_file": scraped.token_file}
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "alerts.yml")],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [{"targets": [address]}],
                "authorization": authorization,
            }
            for job, address in scraped.targets.items()
        ],
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def generate(scraped: Scraped, number: int) -> None:
    body = {
        "prompt": f"Request {number % 4}: return a list of items that are numbers " * 3,
        "max_tokens": 24,
        "temperature": 1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
    }
    if number % 3 == 0:
        body["structured_outputs"] = {"regex": "[a-c]{24}"}
    request = urllib.request.Request(
        f"{scraped.url}/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=60).read()


def wait_for_scrapes(scraped: Scraped, count: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found = scraped.ask("query", query="count_over_time(up[10m])")["result"]
        if len(found) == 3 and all(int(one["value"][1]) >= count for one in found):
            return
        assert time.monotonic() < deadline, found
        generate(scraped, 1)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("prometheus")
    serve = [
        *(Path(sys.executable).with_name("baton"), "serve", "--port", 0, "--grpc-port", 0),
        *("--metrics-port", 0, "--num-gpu-blocks-override", 64, "--max-model-len", 512),
        *("--max-local-prefill-tokens", 0),
    ]
    with running(serve, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        cluster = Scraped(read_until(process, "Ctrl-C"))
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(config_of(cluster)))
        port = free_port()
        cluster.prometheus = f"http://127.0.0.1:{port}"
        command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with running(command) as prometheus, ThreadPoolExecutor(4) as clients:
            read_until(prometheus, "Server is ready")
            for _ in clients.map(lambda number: generate(cluster, number), range(24)):
                pass
            wait_for_scrapes(cluster, SCRAPES)
            yield cluster


def families_of(scraped: Scraped, job: str) -> set[str]:
    request = urllib.request.Request(
        f"http://{scraped.targets[job]}/metrics",
        headers={"Authorization": f"Bearer {scraped.token}"},
    )
    text = urllib.request.urlopen(request, timeout=20).read().decode()
    return {family.name for family in text_string_to_metric_families(text)}


def test_processes_export_what_is_documented_and_nothing_else(scraped):
    engine = {*ENGINE, *VLLM_METRICS, *TRANSFERS, *PROCESS}
    expected = {
        "baton-router": {*ROUTER, *PROCESS},
        "baton-prefill": engine,
        "baton-decode": engine,
    }
    for job, known in expected.items():
        found = {name for name in families_of(scraped, job) if name.startswith(("baton_", "vllm:"))}
        assert found == known, job


def test_no_panel_of_the_dashboard_is_empty(scraped):
    dashboard = json.loads((DEPLOY / "grafana/dashboards/baton-overview.json").read_text())
    for panel in dashboard["panels"]:
        expressions = [target["expr"] for target in panel.get("targets", ())]
        found = [
            scraped.ask("query", query=one.replace("$__rate_interval", "1m"))["result"]
            for one in expressions
        ]
        assert not expressions or any(found), panel["title"]


def test_alerts_are_quiet(scraped):
    groups = scraped.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 9
    assert {rule["name"]: (rule["health"], rule["state"]) for rule in rules} == {
        rule["name"]: ("ok", "inactive") for rule in rules
    }


def test_metrics_need_the_token(scraped):
    for address in scraped.targets.values():
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://{address}/metrics", timeout=20)
