"""Workloads of `baton bench`: requests, flags, refusals."""

import argparse
import json

import pytest

from baton.common.errors import ConfigurationError
from baton.common.model_files.named_models import demo_model_path
from benchmarks.workloads.kind import LengthRange, parse_length_range
from benchmarks.workloads.registry import KINDS, add_workload_args, workload_from_args
from benchmarks.workloads.sharegpt import sharegpt_requests

VOCAB_SIZE = 512


def build_workload(*arguments, vocab_size=VOCAB_SIZE):
    parser = argparse.ArgumentParser()
    add_workload_args(parser)
    return workload_from_args(parser.parse_args(arguments), vocab_size)


def prompts_of(workload):
    return [list(request.prompt_token_ids) for request in workload.requests]


@pytest.mark.parametrize("kind", ["random", "shared-prefix", "conversation", "long"])
def test_kinds_without_files_need_no_flags_and_are_deterministic(kind):
    first, again, other = (build_workload("--workload", kind, "--seed", seed) for seed in "001")
    assert prompts_of(first) == prompts_of(again)
    assert prompts_of(first) != prompts_of(other)
    assert all(0 <= token < VOCAB_SIZE for prompt in prompts_of(first) for token in prompt)
    assert all(request.num_output_tokens >= 1 for request in first.requests)


def test_lengths_stay_in_their_ranges_and_reach_both_ends():
    flags = ("--num-requests", "200", "--input-len", "3:5", "--output-len", "7:8")
    workload = build_workload(*flags)
    assert {len(prompt) for prompt in prompts_of(workload)} == {3, 4, 5}
    assert {request.num_output_tokens for request in workload.requests} == {7, 8}
    assert workload.name == "random 3-5 in, 7-8 out"


def test_groups_share_their_prefix_and_nothing_else():
    flags = ("--num-requests", "6", "--num-groups", "2", "--prefix-len", "40", "--input-len", "4")
    texts = prompts_of(build_workload("--workload", "shared-prefix", *flags))
    assert all(len(prompt) == 44 for prompt in texts)
    assert texts[0][:40] == texts[2][:40] == texts[4][:40]
    assert texts[1][:40] == texts[3][:40] == texts[5][:40]
    assert texts[0][:40] != texts[1][:40]
    assert len({tuple(prompt[40:]) for prompt in texts}) == 6


def test_a_turn_contains_the_previous_turn_and_an_answer_of_its_length():
    flags = ("--num-requests", "7", "--num-turns", "3", "--input-len", "5", "--output-len", "4")
    requests = build_workload("--workload", "conversation", *flags).requests
    assert [request.after for request in requests] == [None, None, None, 0, 1, 2, 3]
    for request in requests[3:]:
        before = requests[request.after]
        history = request.prompt_token_ids[: len(before.prompt_token_ids)]
        assert history == before.prompt_token_ids
        added = len(request.prompt_token_ids) - len(before.prompt_token_ids)
        assert added == before.num_output_tokens + 5


def test_the_given_share_of_prompts_is_long():
    flags = ("--num-requests", "20", "--long-share", "0.2", "--long-len", "90:99")
    lengths = [
        len(p) for p in prompts_of(build_workload("--workload", "long", *flags, "--input-len", "8"))
    ]
    assert sum(90 <= length <= 99 for length in lengths) == 4
    assert lengths.count(8) == 16


def trace_line(timestamp, input_length, output_length, hash_ids):
    return json.dumps(
        {
            "timestamp": timestamp,
            "input_length": input_length,
            "output_length": output_length,
            "hash_ids": hash_ids,
        }
    )


@pytest.fixture
def trace_file(tmp_path):
    lines = [
        trace_line(0, 700, 10, [0, 1]),
        trace_line(1500, 600, 20, [0, 2]),
        trace_line(4000, 1200, 30, [0, 1, 3]),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def common_prefix(left, right):
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), len(left))


def test_a_trace_determines_lengths_arrival_times_and_shared_blocks(trace_file):
    workload = build_workload("--workload", "trace", "--trace", str(trace_file))
    first, second, third = prompts_of(workload)
    assert [len(p) for p in (first, second, third)] == [700, 600, 1200]
    assert [r.arrival_s for r in workload.requests] == [0, 1.5, 4]
    assert [r.num_output_tokens for r in workload.requests] == [10, 20, 30]
    assert 512 <= common_prefix(first, second) < 520
    assert common_prefix(first, third) == 700
    assert max(first) < VOCAB_SIZE


def test_a_trace_is_scaled_and_cut(trace_file):
    flags = ("--length-scale", "0.1", "--time-scale", "0.5", "--max-total-len", "100")
    workload = build_workload("--workload", "trace", "--trace", str(trace_file), *flags)
    first, second = prompts_of(workload)
    assert (len(first), len(second)) == (70, 60)
    assert [r.arrival_s for r in workload.requests] == [0, 0.75]
    assert [r.num_output_tokens for r in workload.requests] == [1, 2]
    assert 52 <= common_prefix(first, second) < 60
    limited = build_workload(
        "--workload", "trace", "--trace", str(trace_file), "--num-requests", "1"
    )
    assert len(limited.requests) == 1


def test_a_malformed_line_is_refused(trace_file):
    with trace_file.open("a") as file:
        file.write(trace_line(5000, 600, 1, [9]) + "\n")
    with pytest.raises(ConfigurationError, match="line 4: input_length is 600; 1 hash_ids"):
        build_workload("--workload", "trace", "--trace", str(trace_file))
    trace_file.write_text("{}\n")
    with pytest.raises(ConfigurationError, match="line 1 is not in Mooncake's format"):
        build_workload("--workload", "trace", "--trace", str(trace_file))


def conversation(question, answer):
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"id": "x", "conversations": turns}


def test_sharegpt_uses_questions_as_prompts_and_lengths_of_answers(tmp_path):
    path = tmp_path / "dataset.json"
    begun_by_model = {"conversations": [{"from": "gpt", "value": "hello"}]}
    exchanges = [conversation(f"What is {n}?", "It is " + "so " * n) for n in range(1, 6)]
    path.write_text(json.dumps([begun_by_model, *exchanges, conversation("", "nothing")]))
    flags = ("--dataset", str(path), "--tokenizer", str(demo_model_path()))
    workload = build_workload("--workload", "sharegpt", *flags, vocab_size=1 << 20)
    assert len(workload.requests) == 5
    assert len({request.num_output_tokens for request in workload.requests}) == 5
    with pytest.raises(ConfigurationError, match=r"made token \d+; the model has 2 tokens"):
        build_workload("--workload", "sharegpt", *flags, vocab_size=2)
    path.write_text('{"no": "list"}')
    with pytest.raises(ConfigurationError, match="no JSON in ShareGPT's format"):
        build_workload("--workload", "sharegpt", *flags)


def test_sharegpt_skips_empty_and_too_long_exchanges():
    def encode(text, add_special_tokens):
        return [0] * (len(text) + add_special_tokens)

    exchanges = [("", "x"), ("x", ""), ("abc", "de"), ("abcd", "efg"), ("ab", "c"), ("a", "b")]
    requests = sharegpt_requests(exchanges, encode, num_requests=2, max_total_len=6)
    lengths = [(len(request.prompt_token_ids), request.num_output_tokens) for request in requests]
    assert lengths == [(4, 2), (3, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefix-len", "5"], "--prefix-len is set, but --workload is random"),
        (["--input-len", "5:2"], "--input-len: length range is 5-2"),
        (["--input-len", "many"], "--input-len: length is 'many'"),
        (["--num-requests", "0"], "--num-requests is 0; it must be >= 1"),
        (["--num-requests", "ten"], "--num-requests is 'ten'; it must be a number"),
        (["--workload", "trace"], "--trace is missing"),
        (["--workload", "trace", "--trace", "/no/where"], "--trace /no/where cannot be read"),
        (["--workload", "long", "--long-share", "1.5"], "--long-share is 1.5"),
    ],
)
def test_bad_flags_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        build_workload(*arguments)


def test_every_flag_is_in_the_help():
    parser = argparse.ArgumentParser()
    add_workload_args(parser)
    text = parser.format_help()
    assert all(flag.option in text for kind in KINDS.values() for flag in kind.flags)


def test_length_ranges_are_read():
    assert parse_length_range("7") == LengthRange(7, 7)
    assert parse_length_range("7:9") == LengthRange(7, 9)
