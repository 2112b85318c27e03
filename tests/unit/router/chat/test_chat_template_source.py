"""A model's chat templates and special tokens are found in the places that `transformers` reads."""

import json

import pytest

from baton.common.errors import ConfigurationError
from baton.common.model_files.named_models import demo_model_path
from router.chat.messages import conversation_of
from router.chat.template import ChatTemplate
from router.chat.template_source import find_templates

CHAT = conversation_of([{"role": "user", "content": "Hi"}])
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CHAT_WITH_TOOLS = conversation_of([{"role": "user", "content": "Hi"}], tools=TOOLS)


@pytest.fixture
def write(tmp_path):
    def write(config=None, **files):
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.jinja"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return str(tmp_path)

    return write


def test_a_model_without_a_template_has_none(write):
    assert ChatTemplate.load(write({"bos_token": "<s>"})) is None


def test_a_text_in_the_tokenizers_settings(write):
    model = write({"chat_template": "{{ messages[0].content }}!"})
    assert ChatTemplate.load(model).render(CHAT) == "Hi!"


def test_named_templates_in_the_tokenizers_settings(write):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tool"},
        {"name": "rag", "template": "{% broken, and not used %}"},
    ]
    template = ChatTemplate.load(write({"chat_template": named}))
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT_WITH_TOOLS) == "1 tool"


def test_files_come_before_the_settings(write):
    model = write(
        {"chat_template": "settings"},
        chat_template="file",
        additional_chat_templates__tool_use="tools",
    )
    template = ChatTemplate.load(model)
    assert template.render(CHAT) == "file"
    assert template.render(CHAT_WITH_TOOLS) == "tools"


def test_a_chat_with_tools_uses_the_default_if_there_is_no_other(write):
    assert ChatTemplate.load(write(chat_template="file")).render(CHAT_WITH_TOOLS) == "file"


def test_special_tokens_are_variables(write):
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": "</s>",
        "pad_token": None,
        "image_token": "<image>",
        "extra_special_tokens": {"audio_token": "<audio>"},
        "add_bos_token": True,
        "added_tokens_decoder": {},
    }
    text = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ image_token }}{{ audio_token }}"
    assert ChatTemplate.load(write(config, chat_template=text)).render(CHAT) == (
        "<s></s><image><audio>"
    )


def test_older_checkpoints_have_their_special_tokens_in_a_file_of_their_own(write, tmp_path):
    model = write({"bos_token": "<old>"}, chat_template="{{ bos_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}}')
    assert ChatTemplate.load(model).render(CHAT) == "<s>"


def test_the_flag_names_a_file_or_has_the_text(write, tmp_path):
    model = write({"bos_token": "<s>"}, chat_template="own", other="{{ bos_token }}other")
    assert ChatTemplate.load(model, str(tmp_path / "other.jinja")).render(CHAT) == "<s>other"
    assert ChatTemplate.load(model, "{{ bos_token }}text").render(CHAT) == "<s>text"
    assert ChatTemplate.load(model, "{{ bos_token }}" + "x" * 5000).render(CHAT)[:4] == "<s>x"
    assert ChatTemplate.load(model, "two\nlines").render(CHAT_WITH_TOOLS) == "two\nlines"


@pytest.mark.parametrize("value", ["no_such_file.jinja", "", ".", "a\0b"])
def test_a_flag_that_is_neither_is_refused(write, value):
    with pytest.raises(
        ConfigurationError, match=r"--chat-template is .*must be the path of a file"
    ):
        ChatTemplate.load(write(), value)


@pytest.mark.parametrize(
    ("text", "line"), [("{% if %}", 1), ("\n\n{{ a b }}", 3), ("{% for x in y %}\n", 1)]
)
def test_an_error_of_syntax_names_file_and_line(write, text, line):
    with pytest.raises(ConfigurationError, match=rf"chat_template\.jinja, line {line}: "):
        ChatTemplate.load(write(chat_template=text))


def test_an_error_of_syntax_in_the_settings_names_the_template(write):
    named = [{"name": "default", "template": ""}, {"name": "tool_use", "template": "{{"}]
    with pytest.raises(
        ConfigurationError, match=r"tokenizer_config\.json, chat_template 'tool_use', line 1: "
    ):
        ChatTemplate.load(write({"chat_template": named}))


@pytest.mark.parametrize("text", ["{% continue %}", "{{ x | no_such_filter }}"])
def test_what_python_or_jinja_cannot_compile_is_refused(write, text):
    with pytest.raises(ConfigurationError, match=r"chat_template\.jinja"):
        ChatTemplate.load(write(chat_template=text))


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": 5},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": ["x"]},
        {"chat_template": {"default": 1}},
        {"bos_token": 5},
        {"bos_token": {}},
        "text",
    ],
)
def test_broken_settings_are_refused(write, config, tmp_path):
    with pytest.raises(ConfigurationError, match=f"chat template of {tmp_path}"):
        ChatTemplate.load(write(config))


@pytest.mark.parametrize("entry", [5, True, ["x"], [{"name": "default"}], [None]])
def test_a_malformed_template_entry_is_named(write, entry):
    with pytest.raises(ConfigurationError, match=r"chat_template is .*; it must be a text, or"):
        ChatTemplate.load(write({"chat_template": entry}))


def test_a_file_that_is_not_utf_8_is_refused(write, tmp_path):
    model = write()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match=f"chat template of {tmp_path}"):
        ChatTemplate.load(model)


def test_templates_without_a_default_are_refused(write):
    named = [{"name": "b", "template": ""}, {"name": "a", "template": ""}]
    with pytest.raises(ConfigurationError, match="named a, b, but none named default"):
        ChatTemplate.load(write({"chat_template": named}))


def test_the_demo_model_has_a_template():
    assert find_templates(str(demo_model_path())).special_tokens["bos_token"] == "<s>"
    template = ChatTemplate.load(str(demo_model_path()))
    messages = [
        {"role": "system", "content": "A."},
        {"role": "user", "content": "B."},
        {"role": "assistant", "content": "C."},
        {"role": "user", "content": "D."},
    ]
    assert template.render(conversation_of(messages)) == "<s>A.\n\nB.\n\nC.\n\nD.\n"
    prefilled = conversation_of(
        messages[:3], add_generation_prompt=False, continue_final_message=True
    )
    assert template.render(prefilled) == "<s>A.\n\nB.\n\nC."
