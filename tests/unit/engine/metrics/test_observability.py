"""The dashboard and the alerts of deploy/observability/ read metrics that exist."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from baton.common.observe.metrics import MetricInfo
from engine.metrics.counts import METRICS as ENGINE
from kvstore.guard.metrics import METRICS as TRANSFERS
from router.observe.metrics import METRICS as ROUTER
from rpc.process_metrics import METRICS as PROCESS

FOLDER = Path(__file__).parents[4] / "deploy" / "observability"
TABLE: dict[str, MetricInfo] = {**ENGINE, **TRANSFERS, **ROUTER, **PROCESS}
NAME = re.compile(r"\bbaton_\w+")


def names() -> set[str]:
    """The names of all series."""
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {name + suffix for name, info in TABLE.items() for suffix in suffixes[info.kind]}


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    dashboard = json.loads((FOLDER / "grafana/dashboards/baton-overview.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def alert_expressions() -> Iterator[tuple[str, str]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        yield rule["alert"], rule["expr"]


def test_every_panel_and_alert_reads_metrics_that_exist():
    known, found = names(), 0
    for title, expression in (*dashboard_expressions(), *alert_expressions()):
        used = set(NAME.findall(expression))
        assert used <= known, title
        found += len(used)
    assert found > 40


def test_every_alert_has_a_test_of_its_silence_and_of_its_alarm():
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    for test, is_alarm in zip(tests, (False, True), strict=True):
        cases = {case["alertname"]: case for case in test["alert_rule_test"]}
        assert set(cases) == {name for name, _ in alert_expressions()}
        assert all(bool(case.get("exp_alerts")) is is_alarm for case in cases.values())


@pytest.mark.parametrize(
    "arguments",
    [
        ("test", "rules", "alerts_test.yml"),
        ("check", "rules", "alerts.yml"),
        ("check", "config", "--syntax-only", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_files(arguments):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    result = subprocess.run(
        [promtool, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
