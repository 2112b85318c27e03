"""Reports: text, page, picture, JSON."""

import argparse
import json
import xml.etree.ElementTree as ElementTree

import pytest

from baton.common.errors import ConfigurationError
from benchmarks.figures import panel_svg, render_page
from benchmarks.latency_report import cumulative, in_flight, latency_panels, token_rate
from benchmarks.metrics import ServiceLevel
from benchmarks.output import add_output_args, check_output_args, write_report
from benchmarks.report import Panel, Report, Series, Table, format_cell, format_table
from benchmarks.request import MeasuredRequest

STYLES = ("line", "steps", "fill", "points", "marked")
PANEL = Panel(
    "All styles",
    "x",
    "y",
    [Series(style, [1, 10, 100], [1, 2, 3], style) for style in STYLES],
    x_limits={"limit": 50},
    y_limits={"floor": 1},
    x_scale="log",
)
REPORT = Report(
    title="a < b",
    facts={"machine": "fast & small"},
    tables=[Table("Figures", ("name", "ms"), [("one", 1.0), ("none", None)], "a note")],
    panels=[PANEL],
    results={"figures": [1]},
)
RECORDS = [
    MeasuredRequest(10, 0.0, [0.1, 0.1, 0.2], 0.25),
    MeasuredRequest(10, 0.1, [0.3, 0.9], 0.9),
    MeasuredRequest(10, 0.2, [], 0.4, error="lost"),
]


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (0.0, "0.000"),
        (0.0521, "0.052"),
        (1.23456, "1.235"),
        (9.87654, "9.877"),
        (123.456, "123.5"),
        (12345.6, "12,346"),
        (12345, "12,345"),
        ("text", "text"),
        (None, "-"),
    ],
)
def test_numbers_have_four_digits(cell, text):
    assert format_cell(cell) == text


def test_a_table_is_aligned():
    assert format_table(REPORT.tables[0]).splitlines() == [
        "Figures",
        "name     ms",
        "----  -----",
        "one   1.000",
        "none      -",
        "a note",
    ]


def parse(*arguments):
    parser = argparse.ArgumentParser()
    add_output_args(parser)
    return parser.parse_args(arguments)


def test_a_report_goes_to_the_terminal_and_into_files(tmp_path, capsys):
    names = ("json", "plot", "html")
    files = [argument for name in names for argument in (f"--{name}", str(tmp_path / name))]
    args = parse(*files)
    check_output_args(args)
    write_report(REPORT, args)
    assert "machine: fast & small" in capsys.readouterr().out
    assert json.loads((tmp_path / "json").read_text()) == {"title": "a < b", "figures": [1]}
    assert (tmp_path / "plot").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "html").read_text()
    assert "<h1>a &lt; b</h1>" in page
    assert "fast &amp; small" in page
    assert page.count("<svg") == 1
    assert "http-equiv" not in page
    assert "src=" not in page


def test_a_page_without_plots_has_its_tables():
    assert "<td>1.000</td>" in render_page(REPORT, [])


def test_a_panel_is_the_same_svg_element_every_time():
    svg = panel_svg(PANEL)
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert svg == panel_svg(PANEL)


def test_a_file_without_a_folder_is_refused_before_anything_runs():
    with pytest.raises(ConfigurationError, match="--json is /no/where/x; there is no folder"):
        check_output_args(parse("--json", "/no/where/x"))


def test_in_flight_counts_requests_sent_and_not_ended():
    times, numbers = in_flight(RECORDS)
    assert times == [0.0, 0.1, 0.2, 0.25, 0.4, 0.9]
    assert numbers == [1, 2, 3, 2, 1, 0]


def test_the_token_rate_sums_to_every_token():
    starts, rates = token_rate(RECORDS)
    width_s = starts[1] - starts[0]
    assert len(starts) == len(rates)
    assert sum(rates) * width_s == pytest.approx(5)
    assert rates[-1] == 0
    assert starts[-1] >= 0.9


def test_a_cumulative_distribution_ascends_from_zero_to_one():
    xs, shares = cumulative([3.0, 1.0, 2.0])
    assert (xs, shares) == ([1, 2, 3], [0, 0.5, 1])
    assert len(cumulative(list(range(10_000)))[0]) <= 400
    assert cumulative([]) == ([], [])


@pytest.mark.parametrize("records", [RECORDS, RECORDS[2:]])
def test_every_run_can_be_drawn(records):
    for panel in latency_panels(records, ServiceLevel(ttft_ms=100, tpot_ms=10)):
        assert panel_svg(panel)
