"""Renders a chat with Baton and with `transformers`."""

from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from baton.common.errors import InvalidArgumentError
from router.chat.messages import conversation_of
from tests.support.chat_cases import SPECIAL_TOKENS

NAMED_ARGUMENTS = ("tools", "documents", "add_generation_prompt", "continue_final_message")
FAILURES = (InvalidArgumentError, TemplateError, TypeError, ValueError)


def tokenizer_with(template):
    """A tokenizer of `transformers` that has a template and no vocabulary."""
    backend = Tokenizer(models.BPE())
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, **SPECIAL_TOKENS
    )


def conversation(messages, arguments):
    """The chat that the arguments of `apply_chat_template` describe."""
    named = {name: arguments[name] for name in NAMED_ARGUMENTS if name in arguments}
    kwargs = {name: value for name, value in arguments.items() if name not in named}
    return conversation_of(messages, template_kwargs=kwargs, **named)


def prompts(template, tokenizer, messages, arguments):
    """Baton's prompt and that of `transformers`; None for a chat that is refused.

    `transformers` gets messages in the form that Baton gives to the template.
    """
    arguments = {"add_generation_prompt": True} | arguments
    chat = conversation(messages, arguments)
    shaped = template.messages_for(chat)
    ours = _outcome(lambda: template.render(chat))
    theirs = _outcome(lambda: _reference(tokenizer, shaped, arguments))
    return ours, theirs


def _reference(tokenizer, messages, arguments):
    if all(None not in message.values() for message in messages):
        return tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    # `apply_chat_template` removes null fields, which some templates look for.
    (prompt,), _ = render_jinja_template(
        [messages],
        chat_template=tokenizer.get_chat_template(tools=arguments.get("tools")),
        **(tokenizer.special_tokens_map | arguments),
    )
    return prompt


def _outcome(render):
    try:
        return render()
    except FAILURES:
        return None
