"""`baton bench split` with real processes, tiny."""

import json

import pytest

from baton.cli import main


@pytest.mark.slow
def test_two_tiers_and_one_worker_serve_the_same_requests(tmp_path, capsys):
    path = tmp_path / "split.json"
    sizes = ("--prompt-tokens", "40", "--output-tokens", "6", "--repeats", "2")
    flags = ("--model", "demo", *sizes, "--num-threads", "1", "--json", str(path))
    assert main(["bench", "split", *flags]) == 0
    report = json.loads(path.read_text())
    assert {"cpu", "instruction_set", "commit", "date"} <= report["machine"].keys()
    (result,) = report["results"]
    for tiers in ("whole", "split"):
        assert result[tiers]["first_token_ms"] > 0
        assert result[tiers]["token_gap_ms"] > 0
    assert result["whole"]["transfer_ms"] == 0 < result["split"]["transfer_ms"]
    assert min(result["floor"].values()) > 0
    assert "split / whole" in capsys.readouterr().out
