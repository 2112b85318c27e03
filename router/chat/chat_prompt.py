"""A gRPC client's chat as a `Conversation`."""

import json
from typing import Any

from baton.errors import InvalidArgumentError
from baton.v1 import generation_pb2
from router.chat.conversation import Conversation
from router.chat.messages import conversation_of

__all__ = ["conversation_of_chat"]


def conversation_of_chat(chat: generation_pb2.Chat) -> Conversation:
    """Reads the JSON texts of a chat.

    Raises:
        InvalidArgumentError: a text is not JSON, or a message is malformed; names the field.
    """
    adds_prompt = chat.add_generation_prompt or not (
        chat.HasField("add_generation_prompt") or chat.continue_final_message
    )
    return conversation_of(
        _parsed("messages_json", chat.messages_json),
        tools=_parsed("tools_json", chat.tools_json),
        documents=_parsed("documents_json", chat.documents_json),
        add_generation_prompt=adds_prompt,
        continue_final_message=chat.continue_final_message,
        template_kwargs=_parsed("chat_template_kwargs_json", chat.chat_template_kwargs_json),
    )


def _parsed(field: str, text: str) -> Any:
    """The value of a JSON text; None for an empty one."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{field} is not JSON: {error}") from None
