"""`baton bench transfer --smoke` runs every part at a tiny size; faults get no figures."""

import json

import pytest

from baton.cli import main
from benchmarks.transfer.moves import measure_moves
from benchmarks.transfer.plan import SMOKE, named_backend
from tests.support.nixl_remote import needs_process_vm_readv


def run(tmp_path, *flags):
    status = main(["bench", "transfer", "--smoke", "--json", str(tmp_path / "run.json"), *flags])
    return status, json.loads((tmp_path / "run.json").read_text())


def check_moves(rows, names):
    assert [(row["backend"], row["num_blocks"]) for row in rows] == [
        (name, count) for name in names for count in SMOKE.rounds
    ]
    for row in rows:
        assert row["load_gb_per_s"] > 0
        assert row["load_to_memcpy"] > 0


def check_prompts(rows, names):
    assert [row["backend"] for row in rows] == list(names)
    for row in rows:
        assert row["hidden"]["prefill_ms"] > 0
        assert row["hidden"]["transfer_ms"] > 0
        assert row["tokens"]["split_to_whole_first"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_connector_of_a_machine_is_measured(tmp_path, capsys):
    needs_process_vm_readv()  # bare nixl is measured as well
    status, report = run(tmp_path, "--part", "moves")
    assert report["not_measured"] == []
    names = ["memory", "shm", "file", "redis", "grpc", "nixl", "multi(nixl,redis)"]
    check_moves(report["moves"], names)
    assert report["prompts"] == []
    for row in report["moves"]:
        has_raw = row["backend"] in ("redis", "nixl")
        assert ("load_to_raw_load" in row) == has_raw
    assert status == 0
    assert {"cpu", "commit", "torch", "xxhash"} <= report["machine"].keys()
    printed = capsys.readouterr().out
    for title in ("tiny, blocks of 4 KiB", "Beside them", "Aims"):
        assert title in printed


@pytest.mark.slow
def test_the_named_connectors_are_measured(tmp_path, capsys):
    status, report = run(tmp_path, "--connector", "memory://bench", f"file://{tmp_path}/kv")
    assert status == 0
    check_moves(report["moves"], ("memory", "file"))
    check_prompts(report["prompts"], ("file",))  # memory is of one process
    assert "Transfers behind prefill" in capsys.readouterr().out


@pytest.mark.slow
def test_corrupt_bytes_get_no_figure():
    backend = named_backend("faulty+memory://bench-harm?faults=corrupt:1")
    for row in measure_moves(SMOKE, [backend]):
        assert row["refused"].endswith("brought 0 of 1 blocks: corrupt") or row["num_blocks"] > 1
        assert "corrupt" in row["refused"]
        assert "load_ms" not in row
