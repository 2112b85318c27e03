"""The parsers that docs/chat.md shows must work, and its tables have every parser."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from baton.common.flags import plugins
from router.chat import reasoning_parsers, tool_parsers
from router.chat.reasoning_parsers import reasoning_parser
from router.chat.tool_parsers import tool_parser
from tests.support.chat_parsers import check_cuts, output_of

GUIDE = (Path(__file__).resolve().parents[4] / "docs" / "chat.md").read_text()


@pytest.fixture
def _installed(tmp_path, monkeypatch):
    codes = [part.split("```")[0] for part in GUIDE.split("```python\n")[1:]]
    (tmp_path / "my_chat_parsers.py").write_text("\n".join(codes))
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        EntryPoint("call", "my_chat_parsers:CallParser", "baton.tool_parsers"),
        EntryPoint("plan", "my_chat_parsers:PlanReasoningParser", "baton.reasoning_parsers"),
    ]

    def fake_entry_points(*, group, name=None):
        return [each for each in points if group == each.group and name in (None, each.name)]

    monkeypatch.setattr(plugins, "entry_points", fake_entry_points)


@pytest.mark.usefixtures("_installed")
def test_the_guides_parsers_are_found_by_entry_point_and_work_as_described():
    make = output_of(tool_parser("call"), reasoning_parser("plan"))
    text = '<plan>CALL f {}</plan>I CALL f {"a": 1} and CALL me'
    expected = ("I  and CALL me", "CALL f {}", [("f", '{"a": 1}')])
    check_cuts(make, text, expected)


@pytest.mark.parametrize("parsers", [tool_parsers, reasoning_parsers])
def test_the_tables_have_every_parser(parsers):
    rows = [line for line in GUIDE.splitlines() if line.startswith("| `")]
    for name in parsers._PARSERS:
        assert any(f"`{name}`" in row.split("|")[1] for row in rows), name
