"""The page in a real browser, over a router whose workers write what the test wants."""

import json
from pathlib import Path

import pytest
import pytest_asyncio

from router.chat.template import ChatTemplate
from router.chat.template_source import TemplateSource, TemplateText
from tests.support.browser import running_browser
from tests.support.fake_workers import EOS_TOKEN_ID, FakeDecode, FakePrefill
from tests.support.running_http import running_http
from tests.support.running_router import script_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

HACK = "window.hacked=1"
IMAGE = f"<img src=x onerror={HACK}>"
TOOL_CALL = json.dumps({"name": "f", "arguments": {"city": IMAGE}})
ANSWER = f"""<think>I think {IMAGE}</think># Title

**bold** {IMAGE} <script>{HACK}</script> [a link](javascript:{HACK}) [good](https://example.org)

```python
print("{IMAGE}")
```

| a | b |
| - | -: |
| {IMAGE} | 2 |
<tool_call>{TOOL_CALL}</tool_call>"""
PARTS = (
    *("*", "**", "_", "`", "```", "~~~", "\n", "\n\n", "> ", "- ", "1. ", "  ", "# ", "|", "|-|"),
    *("[", "](", ")", "!", "<", ">", "\\", "javascript:", "https://a.b/", "a", "é", "&lt;"),
    *(IMAGE, f"<script>{HACK}</script>", f"[x](javascript:{HACK})", f"<javascript:{HACK}>"),
    *(f'[x](https://a.b"onmouseover="{HACK})', f"<svg/onload={HACK}>", "<iframe srcdoc=x>"),
)
FACTS = "document.querySelector('.message.assistant .facts').innerText"
ODD_MARKDOWN = Path(__file__).parents[1] / "data" / "odd_markdown.js"


def chat_config(**config):
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    source = TemplateSource({"default": TemplateText(template, "test")}, {})
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
    return {"chat_template": ChatTemplate(source), **parsers, **config}


async def answered(tab, number: int) -> None:
    await tab.until(f"document.querySelectorAll('.message .facts').length >= {number}")
    await tab.until("document.getElementById('stop').hidden")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory):
    async with running_browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


async def test_an_answer_is_text_whatever_it_contains(browser):
    script = [*script_of(ANSWER), EOS_TOKEN_ID]
    names = ("scripted", IMAGE)
    prefill, decode = FakePrefill(script), FakeDecode(script, pause_after=20)
    config = chat_config(served_model_name=names)
    async with running_http(prefill, decode, **config) as server:
        tab = await browser.open(server.url)
        await tab.until("document.querySelectorAll('#setting-model option').length === 2")
        await tab.write(
            "#setting-tools", json.dumps([{"type": "function", "function": {"name": "f"}}])
        )
        await tab.write("#prompt", f"Hello {IMAGE}")
        await tab.press("Enter")
        # An answer that comes in one piece has no tokens per second.
        await tab.until("document.querySelector('.message.assistant .facts')?.innerText")
        decode.resume()
        await answered(tab, 2)
        assert await tab.evaluate("window.hacked ?? null") is None
        assert await tab.evaluate("document.querySelectorAll('main :is(img, script)').length") == 0
        answer = await tab.text(".message.assistant > .text")
        for shown in ("Title", IMAGE, f"<script>{HACK}</script>", "a link", 'print("'):
            assert shown in answer
        links = "Array.from(document.querySelectorAll('.message a'), (link) => link.href)"
        assert await tab.evaluate(links) == ["https://example.org/"]
        assert await tab.evaluate("document.querySelector('.assistant .reasoning').open") is False
        assert IMAGE in await tab.evaluate(
            "document.querySelector('.assistant .reasoning').textContent"
        )
        assert IMAGE in await tab.text(".assistant .call")
        facts = await tab.text(".message.assistant .facts")
        assert "first token" in facts
        assert "tokens/s" in facts
        # What a tool returns goes to the model, which then goes on.
        await tab.write(".call textarea", IMAGE)
        await tab.click(".call button[type=submit]")
        await answered(tab, 4)
        roles = "Array.from(document.querySelectorAll('.message'), (m) => m.classList[1])"
        assert await tab.evaluate(roles) == ["user", "assistant", "tool", "assistant"]
        # The conversation stays in this browser, and is text again.
        await tab.go(server.url)
        await tab.until("document.querySelectorAll('.message').length === 4")
        assert await tab.evaluate("window.hacked ?? null") is None
        assert tab.problems == []


async def test_an_answer_is_stopped_and_made_again(browser):
    script = script_of("and so on " * 100)
    prefill, decode = FakePrefill(script), FakeDecode(script, pause_after=3)
    async with running_http(prefill, decode, **chat_config(reasoning_parser=None)) as server:
        tab = await browser.open(server.url)
        await tab.write("#prompt", "Go")
        await tab.press("Enter")
        await tab.until("document.querySelector('.message.assistant > .text')?.innerText")
        await tab.press("Escape")
        await tab.until(
            "document.querySelector('.message.assistant .facts').innerText.includes('stopped')"
        )
        await decode.changes.until(lambda: not decode.running)
        decode.resume()
        await tab.write("#setting-max_tokens", "20")
        await tab.click("#regenerate")
        await tab.until(
            "document.querySelector('.message.assistant .facts').innerText.includes('length')"
        )
        assert await tab.evaluate("document.querySelectorAll('.message').length") == 2
        assert "20 tokens" in await tab.text(".message.assistant .facts")
        assert tab.problems == []


async def test_odd_markdown_is_harmless_and_fast(browser):
    script = ODD_MARKDOWN.read_text().replace("PARTS", json.dumps(PARTS))
    decode = FakeDecode(script_of("a"))
    async with running_http(decode) as server:
        tab = await browser.open(server.url)
        facts = await tab.evaluate(script)
        assert isinstance(facts, list), facts
        is_kept, hacked, slowest_ms = facts
        assert (is_kept, hacked) == (True, None)
        # A bound that only a time which grows with the square of the length would break.
        assert slowest_ms < 10_000
        assert tab.problems == []


async def test_stored_rubbish_is_no_conversation(browser):
    stored = [None, 5, {"role": "system"}, {"role": "user", "content": IMAGE, "calls": 3}]
    stored.append({"role": "assistant", "calls": [None, {"name": IMAGE}], "facts": IMAGE})
    decode = FakeDecode(script_of("a"))
    async with running_http(decode) as server:
        tab = await browser.open(server.url)
        for name, value in (("conversation", json.dumps(stored)), ("settings", "{")):
            await tab.evaluate(f"localStorage.setItem('baton.{name}', {json.dumps(value)})")
        await tab.go(server.url)
        await tab.until("document.querySelectorAll('.message').length === 2")
        await tab.until("document.querySelectorAll('#setting-model option').length > 0")
        assert await tab.evaluate("window.hacked ?? null") is None
        assert tab.problems == []
