"""Renders a chat with Baton and with `transformers`."""

from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from baton.errors import InvalidArgumentError
from router.chat.content_format import reads_parts, shape_messages
from router.chat.jinja_environment import build_environment
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

    `transformers` gets content in the form that Baton gives to the template.
    """
    text = tokenizer.get_chat_template(tools=arguments.get("tools"))
    shaped = shape_messages(
        messages,
        as_parts=reads_parts(build_environment().parse(text)),
        has_developer="developer" in text,
    )
    arguments = {"add_generation_prompt": True} | arguments
    ours = _outcome(lambda: template.render(conversation(messages, arguments)))
    theirs = _outcome(lambda: tokenizer.apply_chat_template(shaped, tokenize=False, **arguments))
    return ours, theirs


def _outcome(render):
    try:
        return render()
    except FAILURES:
        return None
