"""`OfflineTokenizer`: what `LLM.get_tokenizer` returns."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from baton.offline.chat_prompts import ChatPrompts
from router.chat.template_source import find_templates
from router.requests.tokenizer import Tokenizer

__all__ = ["OfflineTokenizer"]


class OfflineTokenizer:
    """The tokenizer that a model's prompts go through, with the method names of `transformers`.

    Attributes:
        vocab_size: number of token ids, added tokens included.
    """

    def __init__(
        self, model: str, tokenizer: Tokenizer, chats: ChatPrompts, eos_token_ids: Sequence[int]
    ) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._eos_token_ids = eos_token_ids
        self._model = model
        self._tokenizer = tokenizer
        self._chats = chats

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """The token ids of a text under `input_ids`, and as many ones under `attention_mask`."""
        token_ids = self.encode(text, add_special_tokens)
        return {"input_ids": token_ids, "attention_mask": [1] * len(token_ids)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, by default with the model's special tokens.

        Raises:
            InvalidArgumentError: the text has no UTF-8 form (a lone surrogate).
        """
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        """The text of token ids; ids outside of the vocabulary have no text."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **template_kwargs: Any,
    ) -> str | list[int]:
        """The prompt of a chat: its token ids, or its text without `tokenize`.

        Args:
            conversation: messages as in OpenAI's chat API.
            tools: tools for the template.
            documents: documents for the template.
            chat_template: the path or the text of a template instead of the model's.
            add_generation_prompt: whether the prompt ends with the start of an answer.
            continue_final_message: whether the prompt ends within the last message.
            tokenize: whether to return token ids.
            template_kwargs: further variables of the template.

        Raises:
            FailedPreconditionError: the model has no chat template.
            InvalidArgumentError: a message is malformed, or the template refuses it.
        """
        prompt = self._chats.render(
            conversation,
            chat_template=chat_template,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        text = prompt.text or ""
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def eos_token(self) -> str | None:
        """The text of the end-of-sequence token."""
        return self._special_tokens.get("eos_token")

    @property
    def bos_token(self) -> str | None:
        """The text of the token that starts a sequence."""
        return self._special_tokens.get("bos_token")

    @property
    def pad_token(self) -> str | None:
        """The text of the padding token, which Baton does not use."""
        return self._special_tokens.get("pad_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end-of-sequence token; if the tokenizer names none, the first of the
        model's.
        """
        own = self._id_of(self.eos_token)
        return next(iter(self._eos_token_ids), None) if own is None else own

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token that starts a sequence."""
        return self._id_of(self.bos_token)

    @property
    def pad_token_id(self) -> int | None:
        """The id of the padding token."""
        return self._id_of(self.pad_token)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of special tokens, in ascending order."""
        return sorted(self._tokenizer.special_token_ids)

    @cached_property
    def _special_tokens(self) -> Mapping[str, str]:
        return find_templates(self._model).special_tokens

    def _id_of(self, token: str | None) -> int | None:
        added = self._tokenizer.added_tokens.items()
        return next((token_id for token_id, text in added if text == token), None)
