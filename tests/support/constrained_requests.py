"""Constrained requests for engines on tiny checkpoints, and the tokens that they must generate."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
import torch

from baton.common.model_files.tokenizer_files import load_tokenizer
from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.backends import compile_with, load_backend
from engine.constraints.interface import Backend
from engine.constraints.matcher import Constraint
from engine.constraints.vocabulary import Vocabulary
from engine.request import EngineRequest
from tests.support.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE, prompt_of
from tests.support.requests import engine_request
from tests.support.ruled_generation import by_oracle, generate

__all__ = ["MIXED", "check_text", "expected_tokens", "mixed_requests", "text_of"]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Anna", "Bob", "Christopher"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
MIXED: tuple[dict[str, object], ...] = (
    {"structured_outputs": StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)},
    {"temperature": 0.8},
    {
        "structured_outputs": StructuredOutputs(regex=r"(ab|cd){2,4}-[0-9]{3}"),
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "logprobs": 2,
    },
    {
        "structured_outputs": StructuredOutputs(choice=["yes", "no", "perhaps"]),
        "n": 3,
        "max_tokens": 9,
    },
    {
        "structured_outputs": StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
        "temperature": 1.0,
        "n": 2,
        "logit_bias": {ord("C"): 5.0},
    },
    {"structured_outputs": StructuredOutputs(grammar='root ::= "x" root "y" | "-"'), "n": 1},
    {
        "structured_outputs": StructuredOutputs(regex="[a-d]{2,5}"),
        "temperature": 1.0,
        "n": 2,
        "best_of": 3,
        "max_tokens": 8,
        "allowed_token_ids": [ord("b"), ord("c"), EOS_TOKEN_ID],
    },
)


def mixed_requests() -> list[EngineRequest]:
    """Returns requests with and without constraints; some prompts are prefixes of others."""
    return [
        engine_request(
            request_id=str(index),
            prompt_token_ids=tuple(prompt_of(5 + 7 * index, seed=index % 2)),
            seed=index,
            stop_token_ids=frozenset([EOS_TOKEN_ID]),
            **({"max_tokens": 70} | fields),
        )
        for index, fields in enumerate(MIXED)
    ]


def text_of(tokens: Sequence[int]) -> str:
    """Returns the text of a tiny checkpoint's tokens, which are bytes."""
    return bytes(token for token in tokens if token < 256).decode()


def check_text(outputs: StructuredOutputs, text: str) -> None:
    """Checks that a complete text has its form."""
    if outputs.json is not None:
        jsonschema.validate(json.loads(text), json.loads(outputs.json))
    elif outputs.regex is not None:
        assert re.fullmatch(outputs.regex, text)
    elif outputs.choice is not None:
        assert text in outputs.choice
    else:
        assert re.fullmatch("x*-y*", text)
        assert text.count("x") == text.count("y")


_expected: dict[tuple[object, ...], list[int]] = {}


def expected_tokens(path: Path, request: EngineRequest, index: int) -> list[int]:
    """Returns what candidate `index` draws, one token after another, without an engine.

    Each token of a tiny checkpoint is a byte, so forced tokens are those that draws would give.
    Equal requests, whatever their ids, are computed once.
    """
    key = (path, repr(replace(request.spec, request_id="")), index)
    if key not in _expected:
        _expected[key] = _drawn_tokens(path, request, index)
    return list(_expected[key])


def _drawn_tokens(path: Path, request: EngineRequest, index: int) -> list[int]:
    outputs, choose = request.spec.params.structured_outputs, by_oracle(request, index)
    if outputs is None:
        return generate(path, request, choose)
    matcher = _constraint(path, outputs).new_matcher(request.spec.stop_token_ids)
    mask = np.empty(-(-VOCAB_SIZE // 32), np.int32)

    def choose_allowed(logits: torch.Tensor, tokens: Sequence[int]) -> int:
        matcher.fill_mask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
        token = choose(logits.where(torch.from_numpy(bits == 1), -torch.inf), tokens)
        assert token in request.spec.stop_token_ids or matcher.accept(token)
        return token

    return generate(path, request, choose_allowed, lambda: matcher.is_terminated)


@cache
def _constraint(path: Path, outputs: StructuredOutputs) -> Constraint:
    backends = _backends(path)
    compiled = compile_with(backends, "auto", outputs)
    grammar = backends[compiled.backend].load(compiled.data)
    return Constraint(grammar, _vocabulary(path), f"structured_outputs.{outputs.form}")


@cache
def _backends(path: Path) -> dict[str, Backend]:
    names = ("xgrammar", "llguidance")
    return {name: load_backend(name, _vocabulary(path)) for name in names}


@cache
def _vocabulary(path: Path) -> Vocabulary:
    tokenizer = load_tokenizer(path)
    return Vocabulary.of(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_TOKEN_ID])
