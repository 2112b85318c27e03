"""Pages for operators name metrics, alerts, texts and sizes that exist."""

import re

import pytest
import yaml

from benchmarks.models import RANDOM_MODELS
from engine.metrics.counts import METRICS as ENGINE
from engine.metrics.export import VLLM_METRICS
from kvstore.guard.metrics import METRICS as TRANSFERS
from kvstore.layout import KvLayout
from router.observe.metrics import METRICS as ROUTER
from rpc.process_metrics import METRICS as PROCESS
from tests.support.pages import ROOT

TABLES = (ENGINE, VLLM_METRICS, TRANSFERS, ROUTER, PROCESS)
METRICS = {
    f"{name}_total" if info.kind == "counter" else name
    for table in TABLES
    for name, info in table.items()
}
DOCS = ROOT / "docs"
PAGES = ("capacity", "troubleshooting", "walkthrough", "observability", "kubernetes", "routing")
DEMO = {"num_hidden_layers": 5, "num_key_value_heads": 2, "head_dim": 32}


@pytest.mark.parametrize("page", PAGES)
def test_metrics_and_alerts_exist(page):
    text = (DOCS / f"{page}.md").read_text()
    names = set(re.findall(r"\bbaton_(?:kv|engine|router|process)_\w+", text))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} <= METRICS
    rules = yaml.safe_load((ROOT / "deploy/observability/alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in rules for rule in group["rules"]}
    assert set(re.findall(r"\bBaton[A-Z][A-Za-z]+(?=[ ;,.|])", text)) <= alerts | {"BatonError"}


def running_cluster_rows():
    page = (DOCS / "troubleshooting.md").read_text()
    table = page.split("## A running cluster")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    return [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]


def product_text():
    """The sources, in which a text that several lines have is one text."""
    folders = ("baton", "router", "worker", "engine", "rpc", "kvstore")
    sources = (file.read_text() for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))


def test_messages_of_the_table_are_those_of_the_code():
    sources = product_text().replace("%%", "%")
    # A message is a text in words, with three dots for values; a flag with its value is none.
    messages = [
        message
        for row in running_cluster_rows()
        for cell in (row[0], row[2])
        for message in re.findall(r"`([^`-][^`]+)`", cell)
        if " " in message
    ]
    assert len(messages) >= 12
    # The number of calls is a constant.
    parts = {
        part.strip(" ;").replace("3 calls", "calls").removeprefix("is ejected: ")
        for message in messages
        for part in message.split("...")
    }
    assert [part for part in sorted(parts) if part not in sources] == []


def test_every_row_has_a_metric_or_a_command():
    for symptom, metric, _, action in running_cluster_rows():
        assert "`" in metric or "baton trace" in action, symptom


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("demo", "float32", DEMO),
        *((name, "bfloat16", RANDOM_MODELS[name][1]) for name in ("llama-100m", "qwen3-0.6b")),
        ("llama-3.1-8b", "bfloat16", RANDOM_MODELS["llama-3.1-8b"][1]),
    ],
)
def test_sizes_of_kv_are_those_of_the_engine(name, dtype, shape):
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]

    def block_bytes(kind):
        heads = shape["num_key_value_heads"]
        return KvLayout(shape["num_hidden_layers"], heads, 16, head_dim, kind).block_bytes

    full, narrow = block_bytes(dtype), block_bytes("int8")
    row = f"| {name}, {dtype} | {full // 16:,} | {narrow // 16:,} | {full:,} |"
    assert row in (DOCS / "capacity.md").read_text()
