"""HTTP requests for every endpoint: right ones, and odd ones that are made of them."""

import random
from dataclasses import dataclass, field
from typing import Any

from tests.support.odd_json import json_bytes, mutated, odd_value

_FUNCTION = {
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
_TOOL = {"type": "function", "function": _FUNCTION}
TOOLS = [_TOOL]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "model": ("scripted", "alias", "other", ""),
    "stream": (True, False),
    "stream_options": (
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": True},
    ),
    "temperature": (0, 0.7),
    "top_p": (1, 0.5),
    "top_k": (-1, 0, 5),
    "min_p": (0.1,),
    "n": (1, 2),
    "best_of": (1, 2, 3),
    "seed": (0, 7, -1),
    "stop": ("z", ["z", "q"], [" "]),
    "stop_token_ids": ([5], []),
    "include_stop_str_in_output": (True,),
    "ignore_eos": (True, False),
    "min_tokens": (0, 2),
    "max_tokens": (1, 3, 8),
    "presence_penalty": (0.5,),
    "frequency_penalty": (0.5,),
    "repetition_penalty": (1.1,),
    "logit_bias": ({"5": 1.0, "7": -100},),
    "allowed_token_ids": ([5, 6, 7],),
    "bad_words": (["bad"],),
    "skip_special_tokens": (False,),
    "spaces_between_special_tokens": (False,),
    "truncate_prompt_tokens": (5, -1),
    "prompt_logprobs": (0, 2),
    "add_special_tokens": (True, False),
    "thinking_token_budget": (5,),
    "use_beam_search": (True, False),
    "length_penalty": (1.2,),
    "early_stopping": (True, "never"),
    "response_format": (
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    ),
    "structured_outputs": ({"regex": "a+"}, {"choice": ["a", "b"]}, {"json": _SCHEMA}),
    "guided_json": (_SCHEMA,),
    "guided_regex": ("a+",),
    "guided_choice": (["a"],),
    "guided_grammar": ('root ::= "a"',),
    "vllm_xargs": ({"a": 1},),
    "return_token_ids": (True,),
    "return_tokens_as_token_ids": (True,),
    "echo": (True,),
    "priority": (0, -5),
    "cache_salt": ("salt",),
    "request_id": ("an id",),
    "user": ("u",),
    "unknown": (1,),
}
_CHAT = {
    "tools": ([_TOOL], []),
    "tool_choice": (
        "none",
        "auto",
        "required",
        {"type": "function", "function": {"name": "add"}},
    ),
    "parallel_tool_calls": (True, False),
    "max_completion_tokens": (4,),
    "logprobs": (True, False),
    "top_logprobs": (0, 3),
    "reasoning_effort": ("low",),
    "include_reasoning": (True, False),
    "chat_template_kwargs": ({"mood": "good"},),
    "documents": ([{"title": "a", "text": "b"}],),
    "prediction": (
        {"type": "content", "content": "He"},
        {"type": "content", "content": [{"type": "text", "text": "He"}]},
    ),
    "add_generation_prompt": (True, False),
    "continue_final_message": (True, False),
}
MESSAGES = (
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": "Hi", "name": "a"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "so",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}],
)
_ANTHROPIC = {
    "max_tokens": (1, 4, 9),
    "system": ("Be kind.", [{"type": "text", "text": "Be kind."}]),
    "stop_sequences": (["z"],),
    "tools": ([{"name": "add", "description": "adds", "input_schema": _SCHEMA}],),
    "tool_choice": (
        {"type": "auto"},
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "add"},
        {"type": "none"},
    ),
    "thinking": ({"type": "enabled", "budget_tokens": 10}, {"type": "disabled"}),
    "output_config": (
        {"effort": "low"},
        {"format": {"type": "json_schema", "schema": _SCHEMA}},
    ),
    "metadata": ({"user_id": "a"},),
}
_ANTHROPIC_MESSAGES = (
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so", "signature": ""},
                {"type": "text", "text": "He"},
                {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "3"}]},
    ],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}],
)
_RESPONSES = {
    "instructions": ("Be kind.",),
    "max_output_tokens": (1, 4),
    "max_tool_calls": (1,),
    "top_logprobs": (2,),
    "include": (["message.output_text.logprobs"], []),
    "tools": ([{"type": "function", **_FUNCTION}],),
    "tool_choice": (
        "auto",
        "required",
        {"type": "function", "name": "add"},
        {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "add"}],
        },
    ),
    "parallel_tool_calls": (True, False),
    "text": (
        {"format": {"type": "text"}},
        {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
        {"verbosity": "low"},
    ),
    "reasoning": ({"effort": "low", "summary": "auto"},),
    "truncation": ("auto", "disabled"),
    "store": (False,),
    "metadata": ({"a": "b"},),
    "chat_template_kwargs": ({"mood": "good"},),
}
_INPUTS = (
    "Hi",
    [{"role": "user", "content": "Hi"}],
    [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
    ],
)


@dataclass(frozen=True)
class Endpoint:
    """An endpoint with a body.

    Attributes:
        path: its path.
        needed: fields of every body.
        optional: further fields.
    """

    path: str
    needed: dict[str, tuple[Any, ...]]
    optional: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def body(self, rng: random.Random) -> dict[str, Any]:
        """A body with some of the fields, all with right values."""
        names = rng.sample(sorted(self.optional), min(len(self.optional), rng.randint(0, 5)))
        fields = self.needed | {name: self.optional[name] for name in names}
        return {name: rng.choice(values) for name, values in fields.items()}


ENDPOINTS = (
    Endpoint(
        "/v1/completions",
        {"prompt": ("Hi", ["a", "b"], [5, 6, 7], [[5, 6], [7]]), "max_tokens": (1, 3, 8)},
        _SAMPLING | {"logprobs": (0, 3), "max_tokens": (0, 3)},
    ),
    Endpoint("/v1/chat/completions", {"messages": MESSAGES}, _SAMPLING | _CHAT),
    Endpoint("/v1/responses", {"input": _INPUTS}, _SAMPLING | _RESPONSES),
    Endpoint(
        "/v1/messages",
        {"messages": _ANTHROPIC_MESSAGES, "max_tokens": (1, 4, 9)},
        _SAMPLING | _ANTHROPIC,
    ),
    Endpoint("/v1/messages/count_tokens", {"messages": _ANTHROPIC_MESSAGES}, _ANTHROPIC),
    Endpoint("/v1/embeddings", {"input": ("Hi",)}),
    Endpoint("/v1/responses/input_tokens", {"input": _INPUTS}, _RESPONSES),
    Endpoint("/tokenize", {"prompt": ("Hi",)}, {"return_token_strs": (True,), "model": ("alias",)}),
    Endpoint("/tokenize", {"messages": MESSAGES}, _CHAT),
    Endpoint("/detokenize", {"tokens": ([5, 6, 7], [])}),
)
_PATHS = (
    *(endpoint.path for endpoint in ENDPOINTS),
    "/health",
    "/ready",
    "/ping",
    "/version",
    "/openapi.json",
    "/tokenizer_info",
    "/tokenizer_info?model=other",
    "/v1/models",
    "/v1/models/scripted",
    "/v1/models/a/b",
    "/v1/models/",
    "/v1",
    "/",
    "//",
    "/nothing/😀",
    "/v1/messages/other",
    "/docs",
)
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "X")
_HEADERS = (
    ("content-type", "text/plain"),
    ("content-type", ""),
    ("content-type", "application/json; charset=utf-16"),
    ("content-type", "application/vnd.api+json"),
    ("content-type", "multipart/form-data"),
    ("x-request-id", "one"),
    ("x-request-id", "a b"),
    ("x-request-id", "x" * 200),
    ("x-request-timeout-s", "30"),
    ("x-request-timeout-s", "nan"),
    ("x-request-timeout-s", "-1"),
    ("x-request-timeout-s", "inf"),
    ("x-request-timeout-s", "1e400"),
    ("x-request-timeout-s", "é"),
    ("accept", "text/html"),
    ("accept-encoding", "gzip"),
    ("authorization", "Bearer \xff"),
    ("anthropic-version", "2023-06-01"),
    ("content-encoding", "gzip"),
    ("origin", "null"),
)


@dataclass(frozen=True)
class OddRequest:
    """One HTTP request.

    Attributes:
        leaves_after: the client leaves after this many parts of the answer; None: it stays.
    """

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)
    leaves_after: int | None = None


def odd_request(rng: random.Random) -> OddRequest:
    """A request that may be wrong in several ways at once."""
    endpoint = rng.choices(ENDPOINTS, (4, 4, 4, 4, 1, 1, 1, 1, 1, 1))[0]
    body: Any = endpoint.body(rng)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        if rng.random() < 0.3 and isinstance(body, dict) and endpoint.optional:
            body[rng.choice(sorted(endpoint.optional))] = odd_value(rng)
        else:
            body = mutated(rng, body)
    headers = [("content-type", "application/json")]
    headers += [rng.choice(_HEADERS) for _ in range(rng.choice((0, 0, 0, 0, 1, 2)))]
    if rng.random() < 0.03:
        del headers[0]
    odd_path = rng.random() < 0.03
    return OddRequest(
        method=rng.choice(_METHODS) if rng.random() < 0.03 else "POST",
        path=rng.choice(_PATHS) if odd_path else endpoint.path,
        body=json_bytes(rng, body),
        headers=tuple(
            (name.encode(), value.encode("latin-1"))
            if value.isascii() or value == "Bearer \xff"
            else (name.encode(), value.encode())
            for name, value in headers
        ),
        leaves_after=rng.randint(0, 3) if rng.random() < 0.05 else None,
    )
