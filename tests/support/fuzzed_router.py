"""A router for fuzzed requests: all of them must leave it idle, healthy and as large as before."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil

from router.chat.template import ChatTemplate
from router.chat.template_source import TemplateSource, TemplateText
from tests.support.fake_workers import EOS_TOKEN_ID, MODEL, FakeDecode, FakePrefill
from tests.support.running_http import RunningHttp, running_http
from tests.support.running_router import script_of

MAX_REQUEST_BYTES = 100_000
_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or () %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% for t in tools or () %}{{ t.function | tojson }}{% endfor %}"
    "{% if mood is defined %}[{{ mood }}]{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_ANSWER = '<think>s</think>é😀<tool_call>{"name":"add","arguments":{}}</tool_call>z'
_AT_ONCE = 16
_MAX_GROWTH_BYTES = 150 * 2**20


class FuzzedRouter:
    """A router with scripted workers, whose answers have all kinds of parts.

    Attributes:
        counts: answers by status.
        errors: log records of errors.
    """

    def __init__(self, http_server: RunningHttp, prefill: FakePrefill, decode: FakeDecode) -> None:
        self.http_server = http_server
        self.prefill = prefill
        self.decode = decode
        self.counts: Counter[str] = Counter()
        self.errors: list[logging.LogRecord] = []

    async def run(self, count: int, call: Callable[[int], Awaitable[str]]) -> None:
        """Makes calls 0 to `count`, several at once; each returns its status."""

        async def one(number: int) -> None:
            self.counts[await asyncio.wait_for(call(number), 60)] += 1

        warmed_up = min(count, 4000) // _AT_ONCE * _AT_ONCE
        rss = 0
        for first in range(0, count, _AT_ONCE):
            await asyncio.gather(*(one(first + i) for i in range(_AT_ONCE)))
            if first + _AT_ONCE == warmed_up:
                rss = psutil.Process().memory_info().rss
        assert psutil.Process().memory_info().rss - rss < _MAX_GROWTH_BYTES
        await self.check_health()

    async def check_health(self) -> None:
        """Checks that no request runs on any tier, that a good one is answered, and that no
        error was logged.
        """
        assert not self.errors, self.errors[0].getMessage()
        # Requests of clients that have left end a little later.
        admission = self.http_server.router.service._admission
        for _ in range(4000):
            if not admission.num_running:
                break
            await asyncio.sleep(0.005)
        assert not admission.num_running
        await self.decode.changes.until(lambda: not self.decode.running)
        body = {"prompt": "x", "max_tokens": 2}
        answer = await self.http_server.http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        replicas = (*self.http_server.router.fleet.prefill.candidates, self._decode_replica)
        assert not any(replica.num_requests for replica in replicas)
        assert not self._decode_replica.connection._streams

    @property
    def _decode_replica(self):
        (replica,) = self.http_server.router.fleet.decode.candidates
        return replica


class _Errors(logging.Handler):
    """Keeps the records of errors."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__(logging.ERROR)
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)


@asynccontextmanager
async def fuzzed_router() -> AsyncIterator[FuzzedRouter]:
    script = [*script_of(_ANSWER), EOS_TOKEN_ID]
    script += [50 + i % 200 for i in range(1000 - len(script))]
    prefill = FakePrefill(script, max_model_len=160)
    decode = FakeDecode(script, max_model_len=160, joins_steps=True)
    template = ChatTemplate(TemplateSource({"default": TemplateText(_TEMPLATE, "test")}, {}))
    async with running_http(
        prefill,
        decode,
        chat_template=template,
        served_model_name=(MODEL, "alias"),
        tool_call_parser="hermes",
        reasoning_parser="deepseek_r1",
        http={"max_request_bytes": MAX_REQUEST_BYTES},
    ) as http_server:
        router = FuzzedRouter(http_server, prefill, decode)
        handler = _Errors(router.errors)
        logging.getLogger().addHandler(handler)
        try:
            yield router
        finally:
            logging.getLogger().removeHandler(handler)
