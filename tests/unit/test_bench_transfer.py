"""`baton bench transfer`, what of it is pure: what is refused, hidden shares, aims, tables."""

import argparse

import pytest

from baton.errors import ConfigurationError
from benchmarks.report.text import format_table
from benchmarks.transfer import aims, backends, command, tables
from benchmarks.transfer.cold_memory import ColdMemory
from benchmarks.transfer.connector_end import RefusedError
from benchmarks.transfer.end_host import block_keys
from benchmarks.transfer.ends import Ends
from benchmarks.transfer.moves import _figures
from benchmarks.transfer.plan import FULL, SMOKE
from benchmarks.transfer.prompts import (
    _check_computed,
    _check_loaded,
    hidden_figures,
    token_figures,
)
from benchmarks.transfer.routes import Trace


class FakeHost:
    """Stands for a process whose pool has these digests."""

    def __init__(self, digests):
        self.digests = list(digests)
        self.cleared = []

    def call(self, method, block_ids):
        if method == "clear":
            self.cleared.append(sorted(block_ids))
            return None
        return [self.digests[block] for block in block_ids]


def make_ends(reader_digests, shift=0):
    reader = FakeHost(reader_digests)
    return Ends(FakeHost([b"a", b"b", b"c", b"d"]), reader, 4, shift), reader


# What came is what was sent


def test_what_arrived_is_compared_block_by_block():
    ends, _ = make_ends([b"a", b"b", b"x", b"d"])
    ends.check_landed([3, 0, 1])
    with pytest.raises(RefusedError, match="not those that were sent"):
        ends.check_landed([0, 2])


def test_blocks_in_another_order_are_others():
    ends, _ = make_ends([b"a"] * 4)
    ends.check([0, 1], [b"a", b"b"])
    for digests in ([b"b", b"a"], [b"a"], [b"a", b"b", b"c"]):
        with pytest.raises(RefusedError):
            ends.check([0, 1], digests)


def test_where_one_process_is_both_its_second_half_is_the_readers():
    ends, _ = make_ends([b"-"] * 4 + [b"a", b"b", b"c", b"d"], shift=4)
    ends.check_landed([0, 1, 2, 3])


def test_the_readers_blocks_are_empty_whenever_they_are_taken():
    ends, reader = make_ends([b"0"] * 4)
    first, second = ends.take(2), ends.take(1)
    assert not reader.cleared
    assert len({*first, *second}) == 3
    third = ends.take(2)  # only one was left that nothing had landed in
    assert reader.cleared == [sorted({*first, *second})]
    assert third == first
    ends.take(4)
    assert reader.cleared[1:] == [sorted(first)]


def test_keys_are_of_one_run():
    assert len(set(block_keys("1-0", 300) + block_keys("1-1", 300))) == 600
    assert all(len(key) == 32 for key in block_keys("1-0", 3))


# Figures


def test_ratios_are_of_the_same_round():
    rounds = [
        {"save": 2.0, "load": 4.0, "memcpy": 1.0, "raw_load": 8.0},
        {"save": 20.0, "load": 40.0, "memcpy": 10.0, "raw_load": 20.0},
        {"save": 2.0, "load": 4.0, "memcpy": 3.0, "raw_load": 4.0},
    ]
    figures = _figures(rounds, num_bytes=8_000_000_000)
    assert figures["load_ms"] == 4000.0
    assert figures["load_gb_per_s"] == 2.0
    assert figures["save_to_memcpy"] == 0.5
    assert figures["load_to_raw_load"] == 1.0
    assert "save_to_raw_save" not in figures


def test_buffers_are_gone_round_piece_by_piece():
    memory = ColdMemory(most_bytes=100, least_bytes=250)
    assert [memory._next(100) for _ in range(4)] == [0, 100, 0, 100]
    assert memory.copy_s(100) > 0
    assert bytes(memory._target[:100]) == b"\1" * 100
    assert memory.digest_s(100) > 0


def make_trace(transfers, ready_at, tokens=(5, 6, 7)):
    return Trace(
        sent_at=9.0,
        tokens=list(tokens),
        token_times=[20.5, 21.5, 21.75],
        prefill_began_at=10.0,
        prefill_ended_at=20.0,
        ready_at=ready_at,
        transfers=transfers,
    )


def test_a_transfer_is_hidden_but_for_what_follows_prefill():
    trace = make_trace([(12.0, 14.0), (13.0, 16.0), (19.0, 21.0)], ready_at=20.6)
    figures = hidden_figures([trace])
    assert figures == pytest.approx(
        {"prefill_ms": 10_000, "transfer_ms": 6000, "exposed_ms": 600, "hidden_share": 0.9}
    )


def test_waits_longer_than_the_transfer_hide_nothing():
    assert hidden_figures([make_trace([(20.0, 20.5)], ready_at=22.0)])["hidden_share"] == 0
    assert hidden_figures([make_trace([(12.0, 12.5)], ready_at=19.0)])["hidden_share"] == 1


def test_times_to_tokens_are_compared_only_where_the_tokens_are_the_same():
    split, whole = make_trace([], 20.6), make_trace([], 0.0)
    whole.token_times = [19.0, 19.5, 20.0]
    figures = token_figures([split], [whole])
    assert figures["split_first_ms"] == 11_500.0
    assert figures["whole_second_ms"] == 10_500.0
    assert figures["split_to_whole_first"] == 1.15
    with pytest.raises(RefusedError, match="different tokens"):
        token_figures([split], [make_trace([], 0.0, tokens=(5, 6, 8))])


def test_prompts_must_be_computed_once_and_loaded_whole():
    trace = make_trace([(12.0, 14.0)], 20.6)
    trace.num_loaded_tokens = 100
    _check_computed([trace])
    _check_loaded([trace], 100)
    with pytest.raises(RefusedError, match="100 of 112 tokens"):
        _check_loaded([trace], 112)
    trace.num_found_tokens = 16
    with pytest.raises(RefusedError, match="16 tokens of a prompt were found"):
        _check_computed([make_trace([], 0.0), trace])
    trace.transfers.clear()
    with pytest.raises(RefusedError, match="no save and no load"):
        _check_loaded([trace], 100)


# Aims


def move_row(backend, **figures):
    row = {"shape": "s", "block_bytes": 1024, "backend": backend, "num_blocks": 256}
    ratios = dict.fromkeys(("save_to_memcpy", "load_to_memcpy"), 0.75)
    return row | {"lends": False} | ratios | figures


def test_aims_are_of_the_most_blocks_and_of_what_moves():
    rows = [
        move_row("shm", num_blocks=1, load_to_memcpy=0.1),
        move_row("shm", save_to_memcpy=0.69),
        move_row("nixl", lends=True, save_to_memcpy=0.1),
        move_row("redis", save_to_raw_save=0.8, load_to_raw_load=0.79),
        move_row("grpc", lends=True),
        {"shape": "s", "backend": "nixl", "num_blocks": 256, "refused": "why"},
    ]
    judged = {aim["what"]: aim["is_met"] for aim in aims.judge_moves(rows)}
    assert judged == {
        "shm, s, 256 blocks: save / memcpy": False,
        "shm, s, 256 blocks: load / memcpy": True,
        "nixl, s, 256 blocks: load / memcpy": True,
        "redis, s, 256 blocks: save / raw client": True,
        "redis, s, 256 blocks: load / raw client": False,
    }


def test_only_transfers_shorter_than_prefill_are_to_be_hidden():
    def row(transfer_ms, hidden_share):
        hidden = {"prefill_ms": 10.0, "transfer_ms": transfer_ms, "hidden_share": hidden_share}
        return {"backend": "shm", "prompt_tokens": 7, "hidden": hidden}

    rows = [row(9.0, 0.95), row(11.0, 0.2), {"backend": "shm", "prompt_tokens": 8, "refused": "x"}]
    (aim,) = aims.judge_prompts(rows)
    assert aim == {
        "what": "shm, 7 tokens: hidden share",
        "at_least": 0.9,
        "measured": 0.95,
        "is_met": True,
    }


# Tables


def test_what_is_refused_has_no_figure_but_a_reason():
    refused = {"shape": "s", "block_bytes": 1024, "backend": "file", "num_blocks": 16}
    rows = [
        move_row("shm", save_ms=1.5, save_gb_per_s=2.0, load_ms=1.0, load_gb_per_s=3.0),
        refused | {"refused": "corrupt"},
    ]
    (table,) = tables.move_tables(rows)
    assert "Refused: file, 16: corrupt." in table.note
    assert "lent" not in table.note
    assert set(table.rows[1][2:]) == {None}
    assert format_table(table)
    prompts = [{"backend": "shm", "prompt_tokens": 1024, "refused": "computed the rest"}]
    assert "shm, 1024: computed the rest" in tables.hidden_table(prompts).note
    assert tables.token_table(prompts).rows == []


# What is measured


@pytest.mark.parametrize(
    ("url", "name", "raw", "is_shared", "lends"),
    [
        ("memory://x", "memory", "", False, False),
        ("shm://x", "shm", "", True, False),
        ("redis://user:secret@host", "redis", "redis", True, False),
        ("grpc://", "grpc", "", True, True),
        ("nixl://", "nixl", "nixl", True, True),
        ("multi://nixl://,redis://host", "multi(nixl,redis)", "", True, False),
    ],
)
def test_a_url_tells_what_it_is_measured_beside(url, name, raw, is_shared, lends):
    backend = backends.named_backend(url)
    assert (backend.name, backend.raw) == (name, raw)
    assert (backend.is_shared, backend.lends) == (is_shared, lends)


def test_the_shapes_are_those_of_their_models():
    kib = {name: layout.block_bytes / 1024 for name, layout in FULL.shapes.items()}
    assert kib == {"qwen2-0.5b": 192, "llama-3.2-1b": 512, "llama-3-8b": 2048}
    assert list(FULL.rounds) == [1, 16, 256]
    assert [case.num_tokens for case in FULL.prompts] == [1024, 4096, 16_384]
    assert max(SMOKE.rounds) <= 4


def test_numbers_of_threads_are_checked_before_anything_is_measured():
    parser = argparse.ArgumentParser()
    command.add_args(parser)
    with pytest.raises(ConfigurationError, match="--num-threads is 0"):
        command.main(parser.parse_args(["--smoke", "--num-threads", "0"]))
