"""`baton bench ranks`, with few repetitions."""

import argparse
import json
from pathlib import Path

import pytest

from baton.common.errors import ConfigurationError
from benchmarks import ranks_command
from kernels.library.commands import library

pytestmark = pytest.mark.skipif(library() is None, reason="no native kernels")


def run(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    ranks_command.add_args(parser)
    ranks_command.main(parser.parse_args(arguments))


def test_each_exchange_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks_command, "_REPEATS", 2)
    monkeypatch.setattr(ranks_command, "_ROUNDS", 1)
    monkeypatch.setattr(ranks_command, "_SUMS", (7,))
    path = tmp_path / "ranks.json"
    run("--json", str(path))
    results = json.loads(path.read_text())
    ((size, together, alone),) = results["sums"]
    assert size == 7
    assert together > 0 < alone
    assert [name for name, *_ in results["batches"]] == list(ranks_command._BATCHES)
    assert "Sums of float32 numbers" in capsys.readouterr().out


def test_one_rank_exchanges_nothing() -> None:
    with pytest.raises(ConfigurationError, match="--num-ranks is 1; it must be >= 2"):
        run("--num-ranks", "1")
