"""Parts of `baton bench transfer` that move nothing: refusals, hidden shares, aims, tables."""

import argparse
import asyncio
import random

import pytest

from baton.common.errors import ConfigurationError
from baton.common.request.results import Timings
from benchmarks.cluster import ClusterAnswer
from benchmarks.report import format_table
from benchmarks.transfer import command, plan, tables
from benchmarks.transfer.end_host import TransferRefusedError, block_keys
from benchmarks.transfer.ends import Ends
from benchmarks.transfer.moves import ColdMemory, _figures
from benchmarks.transfer.plan import FULL, SMOKE
from benchmarks.transfer.prompts import (
    _LOAD_SECONDS,
    _LOADED_BYTES,
    _SAVE_SECONDS,
    Trace,
    _ask_both,
    _check_computed,
    _check_loaded,
    hidden_figures,
    token_figures,
)


class FakeHost:
    """A fake of a process whose blocks have the given digests."""

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


# Checks of received blocks


def test_received_blocks_are_compared_one_by_one():
    ends, _ = make_ends([b"a", b"b", b"x", b"d"])
    ends.check_landed([3, 0, 1])
    with pytest.raises(TransferRefusedError, match="not those that were sent"):
        ends.check_landed([0, 2])


def test_blocks_in_a_different_order_are_refused():
    ends, _ = make_ends([b"a"] * 4)
    ends.check([0, 1], [b"a", b"b"])
    for digests in ([b"b", b"a"], [b"a"], [b"a", b"b", b"c"]):
        with pytest.raises(TransferRefusedError):
            ends.check([0, 1], digests)


def test_a_process_that_is_both_ends_reads_into_the_second_half_of_its_pool():
    ends, _ = make_ends([b"-"] * 4 + [b"a", b"b", b"c", b"d"], shift=4)
    ends.check_landed([0, 1, 2, 3])


def test_the_blocks_of_the_reader_are_cleared_before_they_are_reused():
    ends, reader = make_ends([b"0"] * 4)
    first, second = ends.take_blocks(2), ends.take_blocks(1)
    assert not reader.cleared
    assert len({*first, *second}) == 3
    third = ends.take_blocks(2)  # only one empty block was left
    assert reader.cleared == [sorted({*first, *second})]
    assert third == first
    ends.take_blocks(4)
    assert reader.cleared[1:] == [sorted(first)]


def test_block_keys_of_different_runs_are_different():
    assert len(set(block_keys("1-0", 300) + block_keys("1-1", 300))) == 600
    assert all(len(key) == 32 for key in block_keys("1-0", 3))


# Figures


def test_ratios_compare_times_of_the_same_round():
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


def test_cold_memory_uses_each_part_of_its_buffers_in_turn():
    memory = ColdMemory(most_bytes=100, least_bytes=250)
    assert [memory._next(100) for _ in range(4)] == [0, 100, 0, 100]
    assert memory.copy_s(100) > 0
    assert bytes(memory._target[:100]) == b"\1" * 100
    assert memory.digest_s(100) > 0


def make_trace(answer=(), cached_tokens=0, tokens=(5, 6, 7), times_s=(11.5, 12.5, 12.75), **spent):
    timings = Timings(prefill_ms=10_000.0, **dict(answer))
    return Trace(ClusterAnswer(tokens, times_s, timings, cached_tokens), **spent)


def test_only_transfer_time_after_prefill_is_exposed():
    trace = make_trace({"transfer_ms": 400.0, "load_ms": 200.0}, save_s=2.0, load_s=4.0)
    figures = hidden_figures([trace])
    assert figures == pytest.approx(
        {"prefill_ms": 10_000, "transfer_ms": 6000, "exposed_ms": 600, "hidden_share": 0.9}
    )


def test_the_hidden_share_is_zero_if_the_wait_exceeds_the_transfer():
    slow = make_trace({"transfer_ms": 1500.0, "load_ms": 500.0}, save_s=0.5)
    assert hidden_figures([slow])["hidden_share"] == 0
    assert hidden_figures([make_trace(save_s=0.5)])["hidden_share"] == 1


def test_times_to_tokens_are_compared_only_for_equal_tokens():
    split, whole = make_trace(), make_trace(times_s=(10.0, 10.5, 11.0))
    figures = token_figures([split], [whole])
    assert figures["split_first_ms"] == 11_500.0
    assert figures["whole_second_ms"] == 10_500.0
    assert figures["split_to_whole_first"] == 1.15
    with pytest.raises(TransferRefusedError, match="different tokens"):
        token_figures([split], [make_trace(tokens=(5, 6, 8))])


def test_prompts_must_be_computed_in_full_and_loaded_in_full():
    trace = make_trace(loaded_bytes=100.0)
    _check_computed([trace])
    _check_loaded([trace], 100)
    with pytest.raises(TransferRefusedError, match="100 of at least 112 bytes"):
        _check_loaded([trace], 112)
    with pytest.raises(TransferRefusedError, match="16 tokens of a prompt were found"):
        _check_computed([trace, make_trace(cached_tokens=16)])


def test_the_cost_of_a_prompt_is_the_change_of_the_workers_metrics():
    """Costs are differences of the workers' metrics, so earlier prompts do not count."""

    class FakeTiers:
        num_reads = 0

        async def read_metrics(self):
            self.num_reads += 1
            names = (_SAVE_SECONDS, _LOAD_SECONDS, _LOADED_BYTES)
            return dict(zip(names, (self.num_reads, 2 * self.num_reads, 8), strict=True))

        async def ask(self, prompt, num_tokens):
            return ClusterAnswer((1,) * num_tokens, (0.5,) * num_tokens, Timings(), len(prompt))

    asked = _ask_both(5, random.Random(0), SMOKE, FakeTiers(), None)
    split, whole = asyncio.run(asked)
    assert (split.save_s, split.load_s, split.loaded_bytes) == (1, 2, 0)
    assert split.answer.cached_tokens == 5
    assert whole is None


# Aims


def move_row(backend, **figures):
    row = {"shape": "s", "block_bytes": 1024, "backend": backend, "num_blocks": 256}
    ratios = dict.fromkeys(("save_to_memcpy", "load_to_memcpy"), 0.75)
    return row | {"lends": False} | ratios | figures


def test_aims_judge_the_largest_transfer_and_only_moves_that_copy():
    rows = [
        move_row("shm", num_blocks=1, load_to_memcpy=0.1),
        move_row("shm", save_to_memcpy=0.69),
        move_row("nixl", lends=True, save_to_memcpy=0.1),
        move_row("redis", save_to_raw_save=0.8, load_to_raw_load=0.79),
        move_row("grpc", lends=True),
        {"shape": "s", "backend": "nixl", "num_blocks": 256, "refused": "why"},
    ]
    judged = {aim["what"]: aim["is_met"] for aim in tables.judge_moves(rows)}
    assert judged == {
        "shm, s, 256 blocks: save / memcpy": False,
        "shm, s, 256 blocks: load / memcpy": True,
        "nixl, s, 256 blocks: load / memcpy": True,
        "redis, s, 256 blocks: save / raw client": True,
        "redis, s, 256 blocks: load / raw client": False,
    }


def test_only_transfers_shorter_than_prefill_have_an_aim():
    def row(transfer_ms, hidden_share):
        hidden = {"prefill_ms": 10.0, "transfer_ms": transfer_ms, "hidden_share": hidden_share}
        return {"backend": "shm", "prompt_tokens": 7, "hidden": hidden}

    rows = [row(9.0, 0.95), row(11.0, 0.2), {"backend": "shm", "prompt_tokens": 8, "refused": "x"}]
    (aim,) = tables.judge_prompts(rows)
    assert aim == {
        "what": "shm, 7 tokens: hidden share",
        "at_least": 0.9,
        "measured": 0.95,
        "is_met": True,
    }


# Tables


def test_refused_rows_have_a_reason_and_no_figures():
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


# Backends and plans


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
def test_the_url_determines_the_baseline_of_a_connector(url, name, raw, is_shared, lends):
    backend = plan.named_backend(url)
    assert (backend.name, backend.raw) == (name, raw)
    assert (backend.is_shared, backend.lends) == (is_shared, lends)


def test_the_plan_has_the_block_sizes_of_its_models():
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
