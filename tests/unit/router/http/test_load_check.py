"""`LoadCheck`: the input of the load check for a request whose body is not parsed yet."""

import json

import pytest

from router.http.load_check import LoadCheck

DEFAULT_MAX_TOKENS = 16


class Model:
    default_max_tokens = DEFAULT_MAX_TOKENS

    def __init__(self) -> None:
        self.checked: list[int | None] = []

    def check_load(self, timeout_s: float | None, max_tokens: int | None) -> None:
        self.checked.append(max_tokens)

    async def enter(self, timeout_s: float | None) -> None:
        pass


class Models:
    def __init__(self) -> None:
        self.only = Model()


@pytest.mark.parametrize(
    ("path", "fields", "max_tokens"),
    [
        ("/v1/completions", {}, DEFAULT_MAX_TOKENS),
        ("/v1/completions", {"max_tokens": None}, DEFAULT_MAX_TOKENS),
        ("/v1/completions", {"max_tokens": 200}, 200),
        ("/v1/chat/completions", {}, None),
        ("/v1/chat/completions", {"max_completion_tokens": 200}, 200),
        ("/v1/responses", {"max_output_tokens": 200}, 200),
    ],
)
async def test_an_answer_is_as_long_as_the_protocol_says(path, fields, max_tokens):
    served, body = Models(), json.dumps({"prompt": 'so "max_tokens": 5', **fields}).encode()

    async def receive() -> dict:
        return {"type": "http.request", "body": body}

    async def app(scope, receive, send) -> None:
        assert (await receive())["body"] == body

    scope = {"type": "http", "path": path, "headers": [], "query_string": b""}
    await LoadCheck(app, served=served)(scope, receive, None)
    assert served.only.checked == [max_tokens]
