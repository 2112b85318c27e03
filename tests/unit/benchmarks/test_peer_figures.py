"""Comparison with other engines: cases, figures, floors, ratios and agreement."""

from dataclasses import replace

import pytest

from benchmarks.compare_command import print_comparison
from benchmarks.machine import with_best_ceilings, with_median_rates
from benchmarks.model_cost import Ceilings, ModelShape, floor_s, token_floor_s
from benchmarks.peers.cases import CASE_NAMES, build_cases, requests_of_round
from benchmarks.peers.comparison import first_difference, summarize, summarize_agreement
from benchmarks.peers.peer_process import PeerAnswer, PeerRun
from benchmarks.request import BenchRequest

SHAPE = ModelShape(
    num_body_weights=100, num_layers=2, num_head_weights=10, num_attention_features=1
)
BYTES_PER_STEP = 2 * 110
NO_LIMIT = 1e30


def ceilings(read=NO_LIMIT, operations=NO_LIMIT):
    return Ceilings(read_bytes_per_s=read, operations_per_s=operations)


def even_run(requests, first_s, gap_s):
    """Returns a run whose requests get a token after `first_s` and then one every `gap_s`."""
    answers = []
    for request in requests:
        times = tuple(first_s + gap_s * i for i in range(request.num_output_tokens))
        answers.append(PeerAnswer((1,) * len(times), times))
    return PeerRun(max(answer.token_times_s[-1] for answer in answers), tuple(answers))


def test_the_cases_have_their_documented_sizes():
    cases = build_cases(32_768)
    assert tuple(cases) == CASE_NAMES
    sizes = {
        name: (
            len(case.requests),
            sum(len(request.prompt_token_ids) for request in case.requests),
            sum(request.num_output_tokens for request in case.requests),
        )
        for name, case in cases.items()
    }
    assert sizes == {
        "batch-1": (1, 128, 128),
        "mixed": (48, 8_855, 3_750),
        "shared-prefix": (32, 32 * 800, 32 * 32),
        "long-prompts": (4, 12_000, 64),
    }
    prefixes = {tuple(r.prompt_token_ids[:768]) for r in cases["shared-prefix"].requests}
    assert len(prefixes) == 1


def test_token_ids_are_within_the_vocabulary():
    assert build_cases(16_384) == build_cases(32_768)
    largest = max(max(r.prompt_token_ids) for r in build_cases(100)["mixed"].requests)
    assert 90 < largest < 100


def test_prompts_of_different_cases_and_rounds_share_no_prefix():
    cases = build_cases(32_768).values()
    beginnings = [
        {
            tuple(request.prompt_token_ids[:16])
            for request in requests_of_round(case, number, 32_768)
        }
        for case in cases
        for number in range(4)
    ]
    assert len(set().union(*beginnings)) == sum(map(len, beginnings))
    assert [len(b) for b in beginnings] == [1] * 4 + [48] * 4 + [1] * 4 + [4] * 4


def test_the_better_of_two_measurements_is_the_ceiling():
    before = {"cpu": "some", "read_gb_per_s": 20.0, "bfloat16_gflop_per_s": 400}
    after = {"cpu": "some", "read_gb_per_s": 30.0, "bfloat16_gflop_per_s": 300}
    assert with_best_ceilings(before, after) == before | {"read_gb_per_s": 30.0}


def test_rates_measured_in_each_round_are_reduced_to_medians():
    machines = [{"cpu": "some", "read_gb_per_s": rate} for rate in (58.0, 35.0, 36.0)]
    assert with_median_rates(machines) == {"cpu": "some", "read_gb_per_s": 36.0}


def test_a_single_token_reads_every_weight_except_the_embeddings():
    assert token_floor_s(SHAPE, ceilings(read=BYTES_PER_STEP / 4)) == 4


def test_the_floor_is_the_operations_if_they_take_longest():
    # 3 prompt tokens and 1 of the 2 drawn go through the first layer, attending to 1, 2, 3, 4;
    # the last prompt token and the drawn one go through the second too.
    operations = 100 * 4 + 2 * (1 + 2 + 3 + 4) + 100 * 2 + 2 * (3 + 4) + 2 * 10 * 2
    request = BenchRequest((7, 8, 9), num_output_tokens=2)
    assert floor_s([request], SHAPE, ceilings(operations=operations)) == 1


def test_the_floor_is_the_bytes_of_the_longest_answer_if_they_take_longest():
    requests = [BenchRequest((1,), 3), BenchRequest((2,), 5)]
    assert floor_s(requests, SHAPE, ceilings(read=BYTES_PER_STEP)) == 5


def test_floor_computes_a_shared_prefix_once():
    alone = [BenchRequest((1, 2, 3), 1), BenchRequest((1, 2, 4), 1)]
    # Tokens 1, 2, 3 at contexts 1, 2, 3, and token 4 at context 3; two of them draw.
    operations = 100 * 4 + 2 * (1 + 2 + 3 + 3) + 100 * 2 + 2 * (3 + 3) + 2 * 10 * 2
    assert floor_s(alone, SHAPE, ceilings(operations=operations)) == 1
    same_token_elsewhere = [BenchRequest((1, 2), 1), BenchRequest((3, 2), 1)]
    operations = 100 * 4 + 2 * (1 + 2 + 1 + 2) + 100 * 2 + 2 * (2 + 2) + 2 * 10 * 2
    assert floor_s(same_token_elsewhere, SHAPE, ceilings(operations=operations)) == 1


def test_a_summary_has_medians_and_ratios():
    cases = list(build_cases(100).values())
    gaps = {"baton": (0.02, 0.01, 0.03), "vllm": (0.05,) * 3, "openvino": (0.04,) * 3}
    runs = {
        engine: {
            case.name: [even_run(case.requests, first_s=0.5, gap_s=gap) for gap in own]
            for case in cases
        }
        for engine, own in gaps.items()
    }
    by_figure = {
        (e["case"], e["figure"]): e for e in summarize(runs, cases, {"baton": SHAPE}, ceilings())
    }
    token = by_figure["batch-1", "ms per token"]
    assert token["median"] == {"baton": 20, "vllm": 50, "openvino": 40}
    assert token["values"]["baton"] == [20, 10, 30]
    assert (token["best_peer"], token["baton_to_best_peer"]) == ("openvino", 0.5)
    first = by_figure["batch-1", "ms to first token"]
    assert first["median"]["baton"] == 500
    rate = by_figure["shared-prefix", "output tokens/s"]
    assert rate["median"]["baton"] == pytest.approx(1024 / (0.5 + 31 * 0.02), abs=0.01)
    assert (rate["best_peer"], rate["is_less_better"]) == ("openvino", False)
    assert rate["baton_to_best_peer"] == pytest.approx(
        (0.5 + 31 * 0.04) / (0.5 + 31 * 0.02), abs=1e-3
    )
    total = by_figure["long-prompts", "total tokens/s"]
    assert total["median"]["vllm"] == pytest.approx(12_064 / (0.5 + 15 * 0.05), abs=0.01)


def test_each_form_of_the_weights_is_compared_with_its_own_peers_and_floor():
    case = build_cases(100)["batch-1"]
    gaps = {"baton": 4, "vllm": 5, "baton-q4_0": 2, "llamacpp-q4_0": 4, "openvino-int4": 1}
    gaps["baton-q4_0-fast"] = 0.5
    runs = {name: {case.name: [even_run(case.requests, 1, gap)]} for name, gap in gaps.items()}
    small = replace(SHAPE, bytes_per_weight=0.5)
    shapes = {"baton": SHAPE, "baton-q4_0": small, "baton-q4_0-fast": small}
    token, _ = summarize(runs, [case], shapes, ceilings(read=1000))
    assert (token["best_peer"], token["baton_to_best_peer"], token["floor"]) == ("vllm", 0.8, 220)
    rival = {"best_peer": "openvino-int4", "floor": 55.0}
    assert token["others"] == {
        "baton-q4_0": rival | {"baton_to_best_peer": 2.0},
        "baton-q4_0-fast": rival | {"baton_to_best_peer": 0.5},
    }


@pytest.mark.parametrize("engines", [("baton",), ("vllm", "openvino")])
def test_a_summary_without_baton_or_without_peers_has_no_ratio(engines):
    case = build_cases(100)["batch-1"]
    runs = {name: {case.name: [even_run(case.requests, 1, 1)]} for name in engines}
    assert all(
        "best_peer" not in entry for entry in summarize(runs, [case], {"baton": SHAPE}, ceilings())
    )


def test_agreement_counts_the_tokens_before_the_first_difference():
    assert first_difference((1, 2, 3), (1, 2, 3)) == 3
    assert first_difference((1, 5, 3), (1, 2, 3)) == 1
    answers = [PeerAnswer((1, 2), (0.1, 0.2)), PeerAnswer((3, 4), (0.1, 0.2))]
    expected = [PeerAnswer((1, 2), (0.1, 0.2)), PeerAnswer((9, 4), (0.1, 0.2))]
    assert summarize_agreement(answers, expected) == {"agreeing": [2, 0], "of": [2, 2]}


def test_the_printed_comparison_has_every_measured_part(capsys):
    report = {
        "machine": {"cpu": "some"},
        "model": "m",
        "num_weights": 2_000_000,
        "num_threads": 2,
        "repeats": 3,
    }
    print_comparison(report)
    assert "split" not in capsys.readouterr().out
    figure = {
        "case": "mixed",
        "figure": "output tokens/s",
        "is_less_better": False,
        "median": {"baton": 12.0, "vllm": 10.0},
        "floor": 20.0,
        "best_peer": "vllm",
        "baton_to_best_peer": 1.2,
        "others": {"baton-q8_0": {"floor": 40.0}},
    }
    facts = {
        "description": "baton 1",
        "start_to_first_token_s": 1.5,
        "peak_memory_mib": 100,
        "agreement": {"agreeing": [3], "of": [4]},
    }
    report["engines"] = {"baton": facts, "vllm": facts}
    report["figures"] = [figure]
    report["split"] = {"whole": 10.0, "split": 9.0, "split_to_whole": 0.9}
    print_comparison(report)
    printed = capsys.readouterr().out
    assert "| 12.0 | 10.0 | 20.0; baton-q8_0 40.0 | 1.20 (vllm) |" in printed
    assert "| 1.5 | 100 | 3 of 4 |" in printed
    assert "| split / undivided | 0.900 |" in printed
