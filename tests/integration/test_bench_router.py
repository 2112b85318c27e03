"""`baton bench router --smoke` runs each part at a tiny size."""

import json

import pytest

from baton.cli import main

PARTS = {
    "decision": {"num_replicas": 2, "num_tokens": 1000},
    "long-prompts": {"form": "grpc text"},
    "idle": {"num_replicas": 1},
    "connections": {"server": "router grpc", "num_streams": 20},
    "streams": {"server": "bare grpc", "load": "smoke"},
}


@pytest.mark.parametrize(
    "part",
    [name if name == "decision" else pytest.param(name, marks=pytest.mark.slow) for name in PARTS],
)
def test_smoke(part, tmp_path, capsys):
    path = tmp_path / "run.json"
    assert main(["bench", "router", "--smoke", "--part", part, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == [part]
    first = rows[part][0]
    assert first | PARTS[part] == first
    assert all(value >= 0 for key, value in first.items() if isinstance(value, float))
    assert "no figures" in capsys.readouterr().out
