"""A loaded cluster, scraped by a real Prometheus with Baton's own alerts and dashboard."""

import json
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engine.metrics.counts import METRICS as ENGINE
from engine.metrics.export import VLLM_METRICS
from kvstore.guard.metrics import METRICS as TRANSFERS
from router.observe.metrics import METRICS as ROUTER
from rpc.process_metrics import METRICS as PROCESS
from tests.support.ports import reserved_port
from tests.support.serve_process import ServedCluster, read_until, running, running_serve

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
        cluster: the cluster.
        url: the base URL of Prometheus.
    """

    def __init__(self, cluster: ServedCluster, url: str) -> None:
        self.cluster = cluster
        self.url = url

    def ask(self, path: str, **query: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)["data"]


def job_of(name: str) -> str:
    """The job of a process in deploy/observability/."""
    return f"baton-{name.partition('-')[0]}"


def config_of(cluster: ServedCluster) -> dict[str, Any]:
    authorization = {"credentials_file": cluster.token_file}
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "alerts.yml")],
        "scrape_configs": [
            {
                "job_name": job_of(name),
                "static_configs": [{"targets": [address]}],
                "authorization": authorization,
            }
            for name, address in cluster.targets.items()
        ],
    }


def generate(cluster: ServedCluster, number: int) -> None:
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
        f"{cluster.url}/completions",
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
        generate(scraped.cluster, 1)


def wait_until(is_so: Callable[[], bool]) -> bool:
    """Waits until Prometheus shows something; returns False if it never does.

    On a busy machine a scrape may take longer than the second that it has. Its process is then
    down, and without values, until the next one.
    """
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@pytest.fixture(scope="module")
def scraped(tmp_path_factory) -> Iterator[Scraped]:
    folder, port = tmp_path_factory.mktemp("prometheus"), reserved_port()
    with running_serve("--max-local-prefill-tokens", 0) as cluster:
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(config_of(cluster)))
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
            scraped = Scraped(cluster, f"http://127.0.0.1:{port}")
            wait_for_scrapes(scraped, SCRAPES)
            yield scraped


def families_of(cluster: ServedCluster, name: str) -> set[str]:
    request = urllib.request.Request(
        f"http://{cluster.targets[name]}/metrics",
        headers={"Authorization": f"Bearer {cluster.token}"},
    )
    text = urllib.request.urlopen(request, timeout=20).read().decode()
    return {family.name for family in text_string_to_metric_families(text)}


def test_processes_export_what_is_documented_and_nothing_else(scraped):
    engine = {*ENGINE, *VLLM_METRICS, *TRANSFERS, *PROCESS}
    expected = {
        "router": {*ROUTER, *PROCESS},
        "prefill-0": engine,
        "decode-0": engine,
    }
    for process, known in expected.items():
        names = families_of(scraped.cluster, process)
        assert {name for name in names if name.startswith(("baton_", "vllm:"))} == known, process


def test_no_panel_of_the_dashboard_is_empty(scraped):
    dashboard = json.loads((DEPLOY / "grafana/dashboards/baton-overview.json").read_text())
    for panel in dashboard["panels"]:
        queries = [
            target["expr"].replace("$__rate_interval", "1m") for target in panel.get("targets", ())
        ]
        assert not queries or wait_until(
            lambda: any(scraped.ask("query", query=each)["result"] for each in queries)  # noqa: B023 - called here
        ), panel["title"]


def test_alerts_are_quiet(scraped):
    def alerts() -> dict[str, tuple[str, str]]:
        groups = scraped.ask("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return {rule["name"]: (rule["health"], rule["state"]) for rule in rules}

    assert len(alerts()) == 11
    assert wait_until(lambda: set(alerts().values()) == {("ok", "inactive")}), alerts()


def test_metrics_need_the_token(scraped):
    for address in scraped.cluster.targets.values():
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://{address}/metrics", timeout=20)
