"""Answers of models as their chat templates write them: a message, its text, and its parsers."""

import re
from dataclasses import dataclass
from functools import cache

from router.chat.messages import conversation_of
from router.chat.template import ChatTemplate
from tests.support.chat_cases import FAMILIES, source_of
from tests.support.chat_texts import NAMES, WORDS, random_value

USER = {"role": "user", "content": "What is new?"}


@dataclass(frozen=True)
class Format:
    """How a family writes an answer.

    Attributes:
        family: its template.
        end: the text behind an answer.
        reasoning: its parser of reasoning.
        has_content: whether a message with calls may have content, too.
        is_plain: whether a value that is a text is written without escapes, in quotes of Python.
        has_texts_alone: whether values of the arguments have no types.
        max_calls: the most calls of a message.
    """

    family: str
    end: str
    reasoning: str | None = None
    has_content: bool = True
    is_plain: bool = False
    has_texts_alone: bool = False
    max_calls: int = 3


FORMATS = {
    "deepseek_v3": Format("deepseek", "<\uff5cend\u2581of\u2581sentence\uff5c>", has_content=False),
    "deepseek_v31": Format("deepseek_v31", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "deepseek_v32": Format(
        "deepseek_v32", "<\uff5cend\u2581of\u2581sentence\uff5c>", "deepseek_r1"
    ),
    "gemma4": Format("gemma4", "", "gemma4", has_content=False),
    "glm45": Format("glm45", "", "glm45", has_texts_alone=True),
    "granite": Format("granite", "<|end_of_text|>\n"),
    "hermes": Format("qwen3", "<|im_end|>\n", "qwen3"),
    "kimi_k2": Format("kimi_k2", "<|im_end|>"),
    "lfm2": Format("lfm2", "<|im_end|>\n", "qwen3", is_plain=True),
    "minimax_m2": Format("minimax_m2", "[e~[\n", "deepseek_r1", has_texts_alone=True),
    "mistral": Format("mistral", "</s>", has_content=False),
    "olmo3": Format("olmo3", "<|im_end|>\n", is_plain=True),
    "openai": Format("harmony", "<|call|>", "openai_gptoss", has_content=False, max_calls=1),
    "phi4_mini_json": Format("phi4_mini", "<|end|></s>"),
    "seed_oss": Format("seed_oss", "<seed:eos>", "seed_oss", has_texts_alone=True),
}


@cache
def _template(family):
    return ChatTemplate(source_of(default=FAMILIES[family]))


def random_message(rng, name):
    """Returns an answer with calls that a format can have: reasoning, content and calls."""
    form = FORMATS[name]
    calls = [
        (rng.choice(NAMES), _random_arguments(rng, form))
        for _ in range(rng.randint(1, form.max_calls))
    ]
    reasoning = _random_text(rng) if form.reasoning and rng.random() < 0.7 else ""
    content = _random_text(rng) if form.has_content and rng.random() < 0.5 else ""
    return reasoning, content, calls


def _random_text(rng):
    return "Hm " + "".join(rng.choices([word for word in WORDS if word.strip()], k=4)) + "."


def _random_arguments(rng, form):
    keys = ["a", "b", "name", "c_1"]
    values = {key: random_value(rng, 1) for key in keys[: rng.randrange(4)]}
    if form.has_texts_alone:
        return {key: _without_tags(str(value)) for key, value in values.items()}
    if form.is_plain:
        return {key: _without_escapes(value) for key, value in values.items()}
    return values


def _without_tags(value):
    return re.sub("</?(arg_value|parameter|function|seed:tool_call)", "", value)


def _without_escapes(value):
    return re.sub(r"['\\]", "", value) if isinstance(value, str) else value


def answer_text(name, reasoning, content, calls):
    """Returns the text that a template writes for an answer, up to its end."""
    form = FORMATS[name]
    message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": f"{index:09}",
                "type": "function",
                "function": {"name": function, "arguments": arguments},
            }
            for index, (function, arguments) in enumerate(calls)
        ]
    prompt, prompt_and_text = (
        _template(form.family).render(
            conversation_of(
                messages,
                add_generation_prompt=add_generation_prompt,
                template_kwargs={"enable_thinking": True},
            )
        )
        for messages, add_generation_prompt in (([USER], True), ([USER, message], False))
    )
    assert prompt_and_text.startswith(prompt), (prompt, prompt_and_text)
    return prompt_and_text[len(prompt) :].removesuffix(form.end)
