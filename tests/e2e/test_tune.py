"""`baton tune` as a user runs it: a real cluster per candidate, and the flags to use."""

import json

import pytest

from baton.cli import main
from tests.support.checkpoints import tiny_checkpoint


@pytest.mark.slow
def test_a_cluster_is_measured_and_its_flags_are_printed(tmp_path, capfd):
    path, page = tmp_path / "report.json", tmp_path / "report.html"
    model = ("--model", str(tiny_checkpoint("llama")), "--dtype", "float32", "--num-threads", "1")
    pool = ("--num-gpu-blocks-override", "64", "--max-model-len", "128")
    load = ("--num-requests", "6", "--input-len", "40", "--output-len", "3", "--start-rate", "20")
    limits = ("--goodput", "ttft:60000", "tpot:60000", "--time-budget-s", "0.001")
    files = ("--json", str(path), "--html", str(page))
    assert main(["tune", *model, *pool, *load, *limits, *files]) == 0
    (point,) = json.loads(path.read_text())["points"]
    assert (point["share"], point["num_failed"]) == (1, 0)
    assert point["goodput"] > 0
    output = capfd.readouterr().out
    assert "use: baton serve --prefill-workers 1 --decode-workers 1 --model " in output
    assert page.read_text().count("<svg") == 3
