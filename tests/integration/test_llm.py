"""The offline `LLM` on tiny checkpoints: prompts, results, stops and errors."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tqdm import tqdm

from baton import LLM, SamplingParams, StructuredOutputs
from baton.common.errors import ConfigurationError, FailedPreconditionError, InvalidArgumentError
from baton.common.model_files.named_models import demo_model_path
from baton.common.request.prompts import parse_prompts
from engine.draw_params import candidate_seed
from engine.speculation.drafts import Drafts
from router.requests.reasoning import encode_marks
from tests.support.checkpoints import (
    EOS_TOKEN_ID,
    byte_level_alphabet,
    prompt_of,
    reference_beams,
    reference_greedy,
    tiny_checkpoint,
)
from tests.support.logprob_checks import near, reference_logprobs

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def path():
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def llm(path):
    arguments = {"dtype": "float32", "max_num_seqs": 4, "num_gpu_blocks_override": NUM_BLOCKS}
    with LLM(str(path), max_model_len=200, num_threads=1, **arguments) as made:
        yield made


def made(llm, prompt, params):
    (parsed,) = parse_prompts(prompt)
    return llm._model.make_request("r", parsed, params)


@pytest.fixture(autouse=True)
def no_request_left(llm):
    yield
    load = llm._core.scheduler.load()
    assert (load.num_running, load.num_waiting) == (0, 0)
    assert load.num_free_blocks == NUM_BLOCKS


def test_results_are_those_of_transformers_in_the_prompts_order(llm, path):
    prompts = [prompt_of(length, seed=length) for length in (33, 1, 16, 7, 50, 17)]
    results = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.prompt_token_ids == prompt
        assert list(result.outputs[0].token_ids) == reference_greedy(path, prompt, 12)
        assert (result.finish_reason, result.stop_reason) == ("length", None)
        assert result.usage.prompt_tokens == len(prompt)
        assert result.usage.completion_tokens == 12
        assert 0 < result.timings.first_token_ms <= result.timings.total_ms


def test_a_text_is_tokenized_into_its_bytes(llm):
    (from_text,) = llm.generate("Hello", GREEDY, use_tqdm=False)
    (from_ids,) = llm.generate(list(b"Hello"), GREEDY, use_tqdm=False)
    assert from_text.token_ids == from_ids.token_ids
    assert from_text.prompt_token_ids == list(b"Hello")
    expected = bytes(token for token in from_text.token_ids if token < 256)
    assert from_text.text == expected.decode(errors="replace")


def test_a_list_may_mix_texts_and_tokens(llm):
    text, ids = llm.generate(["Hello", list(b"Hello")], GREEDY, use_tqdm=False)
    assert text.outputs == ids.outputs


def test_parameters_may_be_given_under_either_name(llm):
    by_position = llm.generate("abc", GREEDY, use_tqdm=False)
    for name in ("params", "sampling_params"):
        (result,) = llm.generate("abc", **{name: GREEDY}, use_tqdm=False)
        assert result.outputs == by_position[0].outputs
    with pytest.raises(InvalidArgumentError, match="sampling_params and params are both set"):
        llm.generate("abc", GREEDY, params=GREEDY)


def test_a_seed_of_the_model_repeats_the_draws(path):
    token_ids = []
    for _ in range(2):
        with LLM(str(path), seed=7, num_threads=1, max_model_len=64, dtype="float32") as made:
            results = made.generate(["abc", "abc"], {"temperature": 1.5}, use_tqdm=False)
            token_ids.append([result.token_ids for result in results])
    assert token_ids[0] == token_ids[1]
    assert token_ids[0][0] != token_ids[0][1]


def test_defaults_come_from_the_checkpoint_if_no_parameters_are_given(path, tmp_path):
    stated = {"temperature": 0, "max_new_tokens": 3, "repetition_penalty": 1.0}
    folder = shutil.copytree(path, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(stated | {"eos_token_id": 0}))
    arguments = {"dtype": "float32", "num_threads": 1, "max_model_len": 64}
    with LLM(str(folder), **arguments) as made:
        assert made.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)
        (result,) = made.generate("abc", use_tqdm=False)
        assert len(result.token_ids) == 3
        (given,) = made.generate("abc", SamplingParams(max_tokens=5, seed=1), use_tqdm=False)
        assert len(given.token_ids) == 5
    with LLM(str(folder), generation_config="none", **arguments) as made:
        assert made.get_default_sampling_params() == SamplingParams()
    with pytest.raises(ConfigurationError, match="--generation-config is 'file'"):
        LLM(str(folder), generation_config="file", **arguments)


def test_an_end_that_only_the_tokenizer_names_ends_a_generation(path, tmp_path):
    """The ids of config.json are another one, and one that the model has no row for."""
    expected = reference_greedy(path, [97, 98, 99], 12)
    end = next(token for token in expected[2:] if token < 256 and expected.index(token) > 1)
    place = expected.index(end)
    folder = shutil.copytree(path, tmp_path / "model")
    (folder / "generation_config.json").unlink()
    for name, entry in (
        ("config.json", {"eos_token_id": [256, 128009]}),
        ("tokenizer_config.json", {"eos_token": byte_level_alphabet()[end]}),
    ):
        content = json.loads((folder / name).read_text()) | entry
        (folder / name).write_text(json.dumps(content))
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(str(folder), dtype="float32", num_threads=1, max_model_len=64) as made:
        run = partial(made.generate, [[97, 98, 99]], use_tqdm=False)
        (ended,) = run(params)
        (continued,) = run(replace(params, ignore_eos=True))
        (later,) = run(replace(params, min_tokens=place + 2))
    assert list(ended.token_ids) == expected[: place + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", end)
    assert list(continued.token_ids) == expected
    assert continued.finish_reason == "length"
    assert len(later.token_ids) >= place + 2
    assert later.token_ids[place] != end


def test_no_max_tokens_means_as_many_as_fit(llm):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (result,) = llm.generate([prompt_of(150)], params, use_tqdm=False)
    assert (len(result.token_ids), result.finish_reason) == (50, "length")
    fitting = made(llm, prompt_of(150), replace(params, min_tokens=2**32 - 1)).spec.params
    assert (fitting.max_tokens, fitting.min_tokens) == (50, 50)


def test_prompts_are_truncated_to_their_last_tokens(llm):
    prompt = prompt_of(300)
    for truncate, kept in ((20, 20), (-1, 199)):
        params = replace(GREEDY, truncate_prompt_tokens=truncate)
        (result,) = llm.generate([prompt], params, use_tqdm=False)
        assert list(result.prompt_token_ids) == prompt[-kept:]
        assert result.usage.prompt_tokens == kept
    with pytest.raises(InvalidArgumentError, match="200"):
        llm.generate([prompt], replace(GREEDY, truncate_prompt_tokens=250), use_tqdm=False)


def test_without_detokenization_there_is_no_text(llm):
    (plain,) = llm.generate("abc", GREEDY, use_tqdm=False)
    (result,) = llm.generate("abc", replace(GREEDY, detokenize=False), use_tqdm=False)
    assert result.text == ""
    assert result.token_ids == plain.token_ids


def test_the_text_may_include_what_ended_it(llm):
    prompt, index, whole = ascii_prompt(llm)
    token_id = whole.token_ids[index]
    for stop in ({"stop": [chr(token_id)]}, {"stop_token_ids": [token_id]}):
        texts = [
            llm.generate(
                [prompt], replace(GREEDY, include_stop_str_in_output=keep, **stop), use_tqdm=False
            )[0].text
            for keep in (False, True)
        ]
        assert texts[1] == texts[0] + chr(token_id)
        assert whole.text.startswith(texts[1])


def test_bad_words_are_recorded_as_tokens(llm):
    request = made(llm, "abc", replace(GREEDY, bad_words=["no"]))
    assert request.spec.bad_words_token_ids == (tuple(b"no"),)


def test_requests_that_depend_on_the_reasoning_part_record_its_marks(llm, monkeypatch):
    limited = replace(GREEDY, thinking_token_budget=3)
    with pytest.raises(FailedPreconditionError, match="thinking_token_budget is 3, but no tags"):
        llm.generate("abc", limited, use_tqdm=False)
    marks = encode_marks(llm.get_tokenizer(), "<t>", "</t>")
    monkeypatch.setattr(llm._model, "_specs", replace(llm._model._specs, marks=marks))
    assert made(llm, "abc", limited).spec.reasoning == marks
    assert marks.end_token_ids == tuple(b"</t>")
    formed = replace(GREEDY, structured_outputs=StructuredOutputs(regex="a"))
    assert made(llm, "abc", formed).spec.reasoning == marks
    assert made(llm, "abc", GREEDY).spec.reasoning is None


def test_a_prediction_is_recorded_as_tokens(llm):
    request = made(llm, "abc", replace(GREEDY, prediction="no"))
    assert request.spec.prediction_token_ids == tuple(b"no")
    with pytest.raises(InvalidArgumentError, match=r"^prediction has 99999 characters; it must"):
        made(llm, "abc", replace(GREEDY, prediction="n" * 99999))


def test_usage_counts_the_tokens_that_a_prediction_had(monkeypatch):
    # Without measured steps, as many tokens are drafted as allowed, on a busy machine too.
    monkeypatch.setattr(Drafts, "committed", lambda *_: None)
    prompt = "Open the file and return a corresponding file object. If the file"
    params = {"temperature": 0, "max_tokens": 24}
    with LLM(demo_model_path(), speculative_config={"method": "ngram"}, num_threads=1) as drafting:
        (plain,) = drafting.generate(prompt, params, use_tqdm=False)
        params["prediction"] = plain.text
        (predicted,) = drafting.generate(prompt, params, use_tqdm=False)
    assert predicted.token_ids == plain.token_ids
    num_accepted = [each.usage.accepted_prediction_tokens for each in (plain, predicted)]
    assert num_accepted[1] > num_accepted[0]


def test_bad_words_outside_the_models_vocabulary_are_refused_by_name(llm, monkeypatch):
    specs = llm._model._specs
    few = replace(specs, limits=replace(specs.limits, vocab_size=100))
    monkeypatch.setattr(llm._model, "_specs", few)
    with pytest.raises(InvalidArgumentError, match=r"^bad_words is 110; .* vocabulary size 100$"):
        llm.generate([[5]], replace(GREEDY, bad_words=["n"]), use_tqdm=False)


def test_a_mapping_states_some_parameters(llm, monkeypatch):
    monkeypatch.setattr(llm._model, "_default_params", {"max_tokens": 5, "min_p": 0.5})
    stated = {"temperature": 0, "ignore_eos": True}
    (one,) = llm.generate("abc", {**stated, "min_p": None}, use_tqdm=False)
    (full,) = llm.generate("abc", replace(GREEDY, max_tokens=5), use_tqdm=False)
    assert one.token_ids == full.token_ids
    results = llm.generate(["abc", "abc"], [{**stated, "max_tokens": 3}, None], use_tqdm=False)
    assert results[0].token_ids == full.token_ids[:3]
    assert 1 <= len(results[1].token_ids) <= 5
    (beams,) = llm.generate("abc", {"beam_width": 2}, use_tqdm=False)
    assert 1 <= len(beams.token_ids) <= 5
    assert llm._model.complete({"temperature": 0}) == SamplingParams(
        temperature=0, max_tokens=5, min_p=0.5
    )
    with pytest.raises(TypeError, match="topp"):
        llm.generate("abc", {"topp": 1}, use_tqdm=False)


@pytest.mark.parametrize("token_id", [-1, 2**63, 1.5, "a"])
def test_what_is_no_token_of_the_model_is_refused(llm, token_id):
    with pytest.raises(InvalidArgumentError, match=r"^prompt token_ids (is .* be|must be int)"):
        llm.generate([1, token_id], GREEDY)


def test_an_array_of_token_ids_is_one_prompt(llm):
    (result,) = llm.generate(np.array([1, 2, 3]), GREEDY)
    assert result.prompt_token_ids == [1, 2, 3]


def test_an_empty_text_is_a_prompt(llm):
    with pytest.raises(InvalidArgumentError, match="prompt is empty"):
        llm.generate("", GREEDY)


def test_a_call_without_prompts_is_refused(llm):
    with pytest.raises(InvalidArgumentError, match="prompts is missing"):
        llm.generate()


@pytest.mark.parametrize("messages", [None, {"role": "user", "content": "a"}])
def test_a_chat_that_is_no_list_is_refused(llm, messages):
    with pytest.raises(InvalidArgumentError, match="messages"):
        llm.chat(messages, GREEDY, chat_template="{{ messages }}")


def test_no_prompts_give_no_results(llm):
    assert llm.generate([], use_tqdm=False) == []


def test_each_prompt_may_have_its_own_params(llm):
    params = [SamplingParams(max_tokens=number, ignore_eos=True) for number in (1, 5)]
    results = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(result.token_ids) for result in results] == [1, 5]
    with pytest.raises(InvalidArgumentError, match="1 entries for 2 prompts"):
        llm.generate(["a", "b"], params[:1])


def test_a_seed_repeats_its_draw(llm):
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=20, ignore_eos=True)
    alone = llm.generate("abc", params, use_tqdm=False)[0]
    among_others = llm.generate(["xyz", "abc", "q"], params, use_tqdm=False)[1]
    unseeded = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    other = llm.generate("abc", unseeded, use_tqdm=False)[0]
    assert alone.token_ids == among_others.token_ids != other.token_ids


def ascii_prompt(llm):
    """Returns a prompt whose greedy continuation has a printable ASCII character to stop at."""
    for seed in range(200):
        result = llm.generate(prompt_of(5, seed), GREEDY, use_tqdm=False)[0]
        for index, token in enumerate(result.token_ids[3:8], start=3):
            if 32 < token < 127 and token not in result.token_ids[:index]:
                return list(result.prompt_token_ids), index, result
    pytest.fail("no such prompt")


@pytest.fixture
def finished(llm, monkeypatch):
    """Returns a list that gets the index of each candidate that the engine is made to finish."""
    indices = []
    finish = llm._core.scheduler.finish_candidate
    monkeypatch.setattr(
        llm._core.scheduler,
        "finish_candidate",
        lambda name, index: indices.append(index) or finish(name, index),
    )
    return indices


def test_a_stop_text_ends_the_generation_before_it(llm, finished):
    prompt, index, whole = ascii_prompt(llm)
    stop = chr(whole.token_ids[index])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[stop])
    (result,) = llm.generate([prompt], params, use_tqdm=False)
    assert result.token_ids == whole.token_ids[: index + 1]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert stop not in result.text
    assert whole.text.startswith(result.text + stop)
    assert finished == [0], "the engine finishes the candidate and keeps its blocks"


def test_a_stop_token_ends_the_generation(llm):
    prompt, index, whole = ascii_prompt(llm)
    stop = whole.token_ids[index]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    (result,) = llm.generate([prompt], params, use_tqdm=False)
    assert result.token_ids == whole.token_ids[: index + 1]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)


def test_each_candidate_draws_with_its_own_seed(llm):
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=20, ignore_eos=True)
    (several,) = llm.generate("abc", replace(params, n=3), use_tqdm=False)
    assert [completion.index for completion in several.outputs] == [0, 1, 2]
    for index, completion in enumerate(several.outputs):
        alone = replace(params, seed=candidate_seed(7, index))
        assert completion.token_ids == llm.generate("abc", alone, use_tqdm=False)[0].token_ids
        assert completion.score is None
    assert several.usage.completion_tokens == 60
    (again,) = llm.generate("abc", replace(params, n=3), use_tqdm=False)
    assert again.outputs == several.outputs


def test_the_best_candidates_come_first(llm):
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=20, ignore_eos=True, n=4)
    (drawn,) = llm.generate("abc", params, use_tqdm=False)
    (best,) = llm.generate("abc", replace(params, n=2, best_of=4), use_tqdm=False)
    scores = [completion.score for completion in best.outputs]
    assert scores == sorted(scores, reverse=True)
    assert [completion.index for completion in best.outputs] == [0, 1]
    drawn_token_ids = [completion.token_ids for completion in drawn.outputs]
    assert all(completion.token_ids in drawn_token_ids for completion in best.outputs)


def test_beam_search_equals_transformers(llm, path):
    params = SamplingParams(max_tokens=8, beam_width=4, n=2, ignore_eos=True)
    prompt = prompt_of(20, seed=3)
    (result,) = llm.generate([prompt], params, use_tqdm=False)
    expected, scores = reference_beams(path, prompt, num_beams=4, num_returned=2, max_tokens=8)
    assert [list(completion.token_ids) for completion in result.outputs] == expected
    assert [completion.score for completion in result.outputs] == pytest.approx(scores, abs=1e-4)


def test_a_stop_text_ends_only_its_candidate(llm, finished):
    params = SamplingParams(temperature=1.5, seed=11, max_tokens=24, ignore_eos=True, n=3)
    (whole,) = llm.generate("abc", params, use_tqdm=False)
    stop = next(
        character
        for character in whole.outputs[1].text[2:12]
        if character.isascii() and not any(character in o.text for o in whole.outputs[::2])
    )
    (stopped,) = llm.generate("abc", replace(params, stop=[stop]), use_tqdm=False)
    assert finished == [1]  # the engine continues the other candidates
    assert [o.finish_reason for o in stopped.outputs] == ["length", "stop", "length"]
    assert stopped.outputs[1].stop_reason == stop
    assert whole.outputs[1].text.startswith(stopped.outputs[1].text + stop)
    assert [stopped.outputs[i] for i in (0, 2)] == [whole.outputs[i] for i in (0, 2)]


def test_a_prompt_that_never_fits_is_ignored_and_the_others_run(llm, caplog):
    params = [GREEDY, replace(GREEDY, n=4, max_tokens=100, temperature=1), GREEDY]
    before, ignored, after = llm.generate(["a", "b" * 60, "c"], params, use_tqdm=False)
    assert (before.finish_reason, after.finish_reason) == ("length", "length")
    (completion,) = ignored.outputs
    assert (completion.finish_reason, completion.text) == ("ignored", "")
    assert (completion.token_ids, completion.stop_reason) == ([], None)
    assert ignored.usage.prompt_tokens == 60
    assert ignored.timings.total_ms == 0
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "KV blocks" in record.getMessage()


def test_a_bad_field_is_an_error_although_another_prompt_never_fits(llm):
    params = [replace(GREEDY, n=4, max_tokens=100), replace(GREEDY, n=5)]
    with pytest.raises(InvalidArgumentError, match="number of candidates is 5"):
        llm.generate(["b" * 60, "a"], params, use_tqdm=False)


def test_the_prefix_cache_is_reset_on_request(llm):
    prompt = prompt_of(40, seed=98)
    llm.generate([prompt], GREEDY, use_tqdm=False)
    assert llm.reset_prefix_cache() >= 2
    (again,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert again.usage.cached_tokens == 0


def test_a_repeated_prefix_is_not_computed_again(llm):
    prompt = prompt_of(40, seed=99)
    (first,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    (second,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == 32
    assert first.token_ids == second.token_ids


def test_generation_ends_at_the_models_length(llm):
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    (result,) = llm.generate([prompt_of(190)], params, use_tqdm=False)
    assert len(result.token_ids) == 10
    assert result.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "empty"), ([], "empty"), ([EOS_TOKEN_ID + 2], "token_ids"), ([0] * 300, "200")],
)
def test_bad_prompts_are_refused_before_anything_runs(llm, prompt, message):
    with pytest.raises(InvalidArgumentError, match=message):
        llm.generate(["fine", prompt], GREEDY, use_tqdm=False)


def test_an_interrupt_leaves_the_engine_usable(llm, monkeypatch):
    run_step = llm._core.run_step

    def interrupted(on_outputs):
        run_step(on_outputs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._core, "run_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].finish_reason == "length"


def test_the_progress_bar_counts_prompts(llm, capsys):
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capsys.readouterr().err
    llm.generate(["a", "b"], GREEDY, use_tqdm=partial(tqdm, desc="mine"))
    assert "mine: 100%" in capsys.readouterr().err


def test_unknown_and_bad_arguments_are_errors(path):
    with pytest.raises(TypeError, match="max_num_sequences"):
        LLM(str(path), max_num_sequences=4)
    with pytest.raises(ConfigurationError, match="--block-size is 0"):
        LLM(str(path), block_size=0)
    with pytest.raises(ConfigurationError, match="one of --reasoning-start-str and"):
        LLM(str(path), reasoning_start_str="<think>")
    with pytest.raises(ConfigurationError):
        LLM("/nowhere/at/all")


@pytest.mark.parametrize("candidates", [{}, {"n": 2}, {"n": 2, "best_of": 3}])
def test_log_probabilities_are_those_of_transformers(llm, path, candidates):
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=9, logprobs=2, prompt_logprobs=1, **candidates
    )
    prompt = prompt_of(21, seed=4)
    (result,) = llm.generate([prompt], params, use_tqdm=False)
    assert result.prompt_logprobs[0] is None
    check_logprobs(path, prompt, result.prompt_logprobs[1:])
    for completion in result.outputs:
        assert len(completion.logprobs) == len(completion.token_ids)
        check_logprobs(path, (*prompt, *completion.token_ids), completion.logprobs)
        if completion.score is not None:
            mean = completion.cumulative_logprob / len(completion.token_ids)
            assert completion.score == pytest.approx(mean, abs=1e-5)


def check_logprobs(path, token_ids, logprobs):
    reference = reference_logprobs(path, token_ids)
    for position, found in enumerate(logprobs, len(token_ids) - len(logprobs)):
        assert next(iter(found)) == token_ids[position]
        values = [each.logprob for each in found.values()]
        assert values == near(reference[position - 1][list(found)])


def test_a_stop_text_cuts_the_log_probabilities_with_the_tokens(llm):
    prompt, index, whole = ascii_prompt(llm)
    stop = chr(whole.token_ids[index])
    params = replace(GREEDY, stop=[stop], logprobs=0)
    (result,) = llm.generate([prompt], params, use_tqdm=False)
    assert [list(found) for found in result.outputs[0].logprobs] == [
        [token_id] for token_id in whole.token_ids[: index + 1]
    ]


def test_an_ignored_prompt_has_no_log_probabilities(llm, caplog):
    params = replace(GREEDY, n=4, max_tokens=100, logprobs=1, prompt_logprobs=1)
    (ignored,) = llm.generate(["b" * 60], params, use_tqdm=False)
    assert (ignored.prompt_logprobs, ignored.outputs[0].logprobs) == (None, [])
    assert ignored.outputs[0].cumulative_logprob == 0


def test_close_waits_for_kv_that_is_being_saved(path, tmp_path):
    folder, prompt = tmp_path / "kv", prompt_of(40, seed=1)
    url = f"faulty+file://{folder}?faults=delay:1&fault_delay_s=0.5"
    arguments = {"dtype": "float32", "num_gpu_blocks_override": NUM_BLOCKS, "block_size": 8}
    with LLM(str(path), max_model_len=100, num_threads=1, kv_connector=url, **arguments) as llm:
        (result,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    num_computed = len(prompt) + len(result.outputs[0].token_ids) - 1
    assert len(list(folder.glob("objects/*/*"))) == num_computed // 8


def test_the_first_request_does_not_wait_for_an_import_of_torchs_compiler():
    code = (
        "import sys; from baton import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny_checkpoint('llama'))!r}, max_model_len=64)\n"
        "llm.generate([{'prompt_token_ids': [1, 2]}], SamplingParams(max_tokens=4))\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split()[-1] == "False"
