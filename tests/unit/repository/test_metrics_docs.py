"""docs/metrics.md lists every metric of every table, with its type and its labels."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.common.observe.metrics import MetricInfo
from engine.metrics.counts import METRICS as ENGINE
from engine.metrics.export import VLLM_METRICS
from kvstore.guard.metrics import METRICS as TRANSFERS
from router.observe.metrics import METRICS as ROUTER
from rpc.process_metrics import METRICS as PROCESS

DOCUMENT = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()

TABLES: list[Mapping[str, MetricInfo]] = [TRANSFERS, ENGINE, VLLM_METRICS, ROUTER, PROCESS]

COMMON_LABELS = {"backend", "model_name", "engine"}
"""Labels that the text above a table names for all its metrics."""

_ROW = re.compile(r"^\| `((?:baton_|vllm:)\w+)` \| (\w+) \| (.*?) ?\| ", re.MULTILINE)


def _known() -> dict[str, tuple[str, list[str]]]:
    """Returns type and labels of every metric by the name that Prometheus shows."""
    return {
        f"{name}_total" if info.kind == "counter" else name: (
            info.kind,
            [label for label in info.labels if label not in COMMON_LABELS],
        )
        for table in TABLES
        for name, info in table.items()
    }


def test_documented_metrics_are_those_of_the_tables():
    rows = _ROW.findall(DOCUMENT)
    documented = {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows}
    assert len(documented) == len(rows)
    assert documented == _known()


def test_no_two_tables_have_the_same_metric():
    assert sum(map(len, TABLES)) == len(_known())


def test_metrics_have_the_names_that_prometheus_recommends():
    for name, (kind, labels) in _known().items():
        assert re.fullmatch(r"(baton_(kv|engine|router|process)_|vllm:)[a-z_0-9]+", name)
        assert (kind == "counter") == name.endswith("_total")
        assert not re.search(r"_(ms|us|ns|milliseconds|mb|kb|bucket|count|sum|created)$", name)
        assert not {"le", "quantile"} & set(labels)


def test_documented_queries_name_metrics_that_exist():
    queries = re.findall(r"^\| [^|]+ \| `([^`]*\[.*)` \|$", DOCUMENT, re.MULTILINE)
    assert len(queries) >= 5
    named = {name for query in queries for name in re.findall(r"baton_\w+", query)}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= set(_known())


@pytest.mark.parametrize("table", TABLES, ids=lambda table: next(iter(table)))
def test_every_metric_has_a_help_text_that_is_a_sentence(table):
    for info in table.values():
        assert info.text.endswith(".")
        assert info.text[0].isupper() or info.text[0].isdigit() or info.text.startswith("vLLM")
