"""`LLM` as users of vLLM call it: kinds of prompts, chats, beams and the tokenizer."""

from dataclasses import replace

import pytest

from baton import LLM, BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from baton.common.errors import FailedPreconditionError, InvalidArgumentError
from baton.common.request.results import Timings, Usage
from baton.offline.beam_search import beam_search_output
from tests.support.checkpoints import EOS_TOKEN_ID, prompt_of, reference_beams, tiny_checkpoint
from tests.support.logprob_checks import reference_logprobs

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}{% endfor %}"
    "{{ note }}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURN = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def path():
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def llm(path):
    arguments = {"dtype": "float32", "max_num_seqs": 4, "num_threads": 1}
    with LLM(str(path), max_model_len=200, chat_template=TEMPLATE, **arguments) as made:
        yield made


@pytest.mark.parametrize(
    "prompts",
    [
        {"prompt": "abc"},
        [{"prompt_token_ids": list(b"abc")}, "abc", {"prompt": "abc", "cache_salt": "s"}],
    ],
)
def test_prompts_may_be_dictionaries(llm, prompts):
    (expected,) = llm.generate("abc", GREEDY, use_tqdm=False)
    results = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert len(results) == (1 if isinstance(prompts, dict) else 3)
    assert all(result.outputs == expected.outputs for result in results)
    assert results[-1].prompt == "abc"


def test_token_ids_may_have_their_earlier_name(llm):
    ids = list(b"abc")
    (expected,) = llm.generate("abc", GREEDY, use_tqdm=False)
    for given in (ids, [ids]):
        (result,) = llm.generate(prompt_token_ids=given, sampling_params=GREEDY, use_tqdm=False)
        assert result.outputs == expected.outputs
        assert result.prompt is None
    with pytest.raises(InvalidArgumentError, match="prompts and prompt_token_ids are both set"):
        llm.generate("abc", prompt_token_ids=ids)


def test_priorities_reach_the_engine(llm, monkeypatch):
    added = []
    add_request = llm._core.scheduler.add
    monkeypatch.setattr(
        llm._core.scheduler,
        "add",
        lambda request: added.append(request.spec.priority) or add_request(request),
    )
    llm.generate(["a", "b"], GREEDY, priority=[3, -1], use_tqdm=False)
    llm.generate("a", GREEDY, use_tqdm=False)
    assert added == [3, -1, 0]
    with pytest.raises(InvalidArgumentError, match="priority has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[1])
    with pytest.raises(InvalidArgumentError, match="lora_request is set"):
        llm.generate("a", GREEDY, lora_request=object())


def test_chats_are_answered_as_their_prompts(llm):
    text = "<user>Hi<assistant>"
    (expected,) = llm.generate(text, GREEDY, use_tqdm=False)
    (result,) = llm.chat([TURN], GREEDY, use_tqdm=False)
    assert (result.prompt, result.outputs) == (text, expected.outputs)
    several = llm.chat([[TURN], [TURN, {"role": "assistant", "content": "A"}, TURN]], GREEDY)
    assert [each.prompt for each in several] == [text, "<user>Hi<assistant>A<user>Hi<assistant>"]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    (result,) = llm.chat(
        [TURN],
        GREEDY,
        use_tqdm=False,
        tools=tools,
        add_generation_prompt=False,
        chat_template_kwargs={"note": "!"},
    )
    assert result.prompt == "<user>Hi<tool>weather!"
    (result,) = llm.chat([TURN], GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert result.prompt == "Hi"
    (result,) = llm.chat(
        [TURN, {"role": "assistant", "content": "It is"}],
        GREEDY,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert result.prompt == "<user>Hi<assistant>It is"


def test_a_prompt_of_a_template_gets_no_further_special_tokens(llm, monkeypatch):
    asked = []
    encode = llm._model._specs.tokenizer.encode
    monkeypatch.setattr(
        llm._model._specs.tokenizer,
        "encode",
        lambda text, add_special_tokens=True: asked.append(add_special_tokens) or encode(text),
    )
    llm.chat([TURN], GREEDY, use_tqdm=False)
    llm.generate("Hi", GREEDY, use_tqdm=False)
    assert asked == [False, True]


def test_bad_chats_are_refused(llm, monkeypatch):
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\].role is 'poet'"):
        llm.chat([{"role": "poet", "content": "a"}])
    with pytest.raises(InvalidArgumentError, match="messages is empty"):
        llm.chat([])
    with pytest.raises(InvalidArgumentError, match="lora_request"):
        llm.chat([TURN], lora_request=object())
    monkeypatch.setattr(llm._model.chats, "_chat_template", None)
    with pytest.raises(FailedPreconditionError, match="has no chat template"):
        llm.chat([TURN])


def test_the_tokenizer_is_that_of_prompts(llm):
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("ab") == tokenizer("ab")["input_ids"] == list(b"ab")
    assert tokenizer.decode([97, EOS_TOKEN_ID]) != tokenizer.decode(
        [97, EOS_TOKEN_ID], skip_special_tokens=True
    )
    assert tokenizer.decode(97) == "a"
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (EOS_TOKEN_ID, len(tokenizer))
    assert EOS_TOKEN_ID in tokenizer.all_special_ids
    assert tokenizer.decode(tokenizer.eos_token_id) == tokenizer.eos_token
    text = tokenizer.apply_chat_template([TURN], tokenize=False, add_generation_prompt=True)
    assert text == "<user>Hi<assistant>"
    assert tokenizer.apply_chat_template([TURN], note="!") == list(b"<user>Hi!")


def test_the_end_of_sequence_token_is_the_tokenizers(llm, monkeypatch):
    tokenizer = llm.get_tokenizer()
    monkeypatch.setattr(tokenizer, "_eos_token_ids", (3, EOS_TOKEN_ID))
    assert tokenizer.eos_token_id == EOS_TOKEN_ID
    monkeypatch.setattr(tokenizer, "_special_tokens", {})
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (None, 3)


def test_tokens_with_log_probabilities_have_texts(llm):
    (result,) = llm.generate("abc", replace(GREEDY, logprobs=2), use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    for found in result.outputs[0].logprobs:
        assert {i: each.decoded_token for i, each in found.items()} == {
            i: tokenizer.decode(i) for i in found
        }
    without = replace(GREEDY, logprobs=0, detokenize=False)
    (result,) = llm.generate("abc", without, use_tqdm=False)
    assert next(iter(result.outputs[0].logprobs[0].values())).decoded_token is None


def test_beam_search_has_vllms_results(llm, path):
    prompt = prompt_of(20, seed=3)
    params = BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True, length_penalty=2.0)
    (one, two) = llm.beam_search([{"prompt_token_ids": prompt}, "abc"], params)
    expected, _ = reference_beams(path, prompt, num_beams=4, num_returned=4, max_tokens=8)
    assert [sequence.tokens[20:] for sequence in one.sequences] == expected
    for sequence in one.sequences:
        assert sequence.tokens[:20] == prompt
        assert sequence.text == llm.get_tokenizer().decode(sequence.tokens)
        found = reference_logprobs(path, sequence.tokens)
        own = [found[i - 1, sequence.tokens[i]].item() for i in range(20, 28)]
        assert sequence.cum_logprob == pytest.approx(sum(own), abs=1e-4)
        assert (sequence.finish_reason, sequence.stop_reason) == ("length", None)
    assert len(two.sequences) == 4


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_of_beams_is_left_out_unless_asked_for(include):
    params = BeamSearchParams(2, 8, include_stop_str_in_output=include)
    completion = CompletionOutput(0, "ab", [5, 6], "stop", 6, score=-1.5)
    result = RequestOutput("r", [completion], Usage(1, 0, 2), Timings(), prompt_token_ids=[4])
    (sequence,) = beam_search_output(result, params, str).sequences
    assert sequence.tokens == ([4, 5, 6] if include else [4, 5])
    assert (sequence.text, sequence.cum_logprob) == (str(sequence.tokens), -3.0)
