"""Log-probabilities in the shapes of OpenAI's APIs and vLLM's."""

from collections.abc import Iterable, Sequence
from typing import Any

from baton.common.request.answer import TokenLogprobs
from router.http.token_texts import TextPlaces, TokenTexts

__all__ = ["LegacyLogprobs", "chat_logprobs", "num_logprob_bytes", "prompt_logprobs"]

_MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; as in vLLM."""
_LOGPROB_BYTES = 128
"""About how many bytes of an answer the log-probabilities of a token take, for each one."""


class LegacyLogprobs:
    """OpenAI's legacy `logprobs` of one choice, piece by piece.

    Args:
        texts: the texts of the model's tokens.
        as_ids: whether tokens are written as `token_id:ID`.
        has_special: whether the generated text has the texts of special tokens.
    """

    def __init__(self, texts: TokenTexts, *, as_ids: bool, has_special: bool) -> None:
        self._texts = texts
        self._as_ids = as_ids
        self._has_special = has_special
        self._places = TextPlaces(texts)

    def prompt_fields(
        self,
        token_ids: Sequence[int],
        logprobs: Iterable[TokenLogprobs],
        text: str,
    ) -> dict[str, list[Any]]:
        """The fields for a prompt that the choice begins with; `text` is the prompt's."""
        fields = self.fields(token_ids, [None, *logprobs], text)
        self._places.move(len(text))
        return fields

    def fields(
        self,
        token_ids: Sequence[int],
        logprobs: Iterable[TokenLogprobs | None],
        prompt: str | None = None,
    ) -> dict[str, list[Any]]:
        """The fields for the next tokens; a token without log-probabilities has null.

        Args:
            token_ids: the tokens.
            logprobs: one per token.
            prompt: the prompt's text, if the tokens are its.
        """
        tokens: list[str] = []
        own: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            text = self._written(token_id)
            tokens.append(text)
            own.append(None if entry is None else max(entry.logprob, _MIN_LOGPROB))
            top.append(None if entry is None else self._top(text, entry))
            offsets.append(self._place(token_id, prompt))
        return {
            "tokens": tokens,
            "token_logprobs": own,
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _place(self, token_id: int, prompt: str | None) -> int:
        """Adds a token; returns the place in the choice's text at which it begins."""
        if not self._is_written(token_id, prompt):
            return self._places.place
        place = self._places.push(token_id)
        if prompt is not None and place == 0:
            text = self._texts.text(token_id)
            if text[:1] == " " and not prompt.startswith(text) and prompt.startswith(text[1:]):
                self._places.move(self._places.place - 1)  # texts lack the tokenizer's first space
        return place

    def _is_written(self, token_id: int, prompt: str | None) -> bool:
        """Whether the choice's text has a token: it may lack special ones."""
        if not self._texts.is_special(token_id):
            return True
        if prompt is None:
            return self._has_special
        return prompt.startswith(self._texts.text(token_id), self._places.place)

    def _top(self, text: str, entry: TokenLogprobs) -> dict[str, float]:
        top = {
            self._written(token_id): max(logprob, _MIN_LOGPROB)
            for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        }
        top.setdefault(text, max(entry.logprob, _MIN_LOGPROB))
        return top

    def _written(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._texts.text(token_id)


def chat_logprobs(
    texts: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    *,
    as_ids: bool = False,
) -> dict[str, Any]:
    """OpenAI's `logprobs` of a chat's choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": f"token_id:{token_id}" if as_ids else texts.text(token_id),
            "logprob": max(logprob, _MIN_LOGPROB),
            "bytes": list(texts.bytes_of(token_id)),
        }

    content = [
        entry(token_id, own.logprob)
        | {"top_logprobs": list(map(entry, own.top_token_ids, own.top_logprobs))}
        for token_id, own in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    texts: TokenTexts,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` of vLLM, by token id; null for the first token of the prompt."""
    return [
        None,
        *(
            _by_token(texts, token_id, own)
            for token_id, own in zip(token_ids[1:], logprobs, strict=True)
        ),
    ]


def _by_token(texts: TokenTexts, token_id: int, own: TokenLogprobs) -> dict[str, dict[str, Any]]:
    entries = [(token_id, own.logprob, own.rank)]
    pairs = zip(own.top_token_ids, own.top_logprobs, strict=True)
    entries += [(other, logprob, rank) for rank, (other, logprob) in enumerate(pairs, start=1)]
    return {
        str(each): {
            "logprob": max(logprob, _MIN_LOGPROB),
            "rank": rank,
            "decoded_token": texts.text(each),
        }
        for each, logprob, rank in entries
    }


def num_logprob_bytes(logprobs: Sequence[TokenLogprobs]) -> int:
    """About how many bytes of an answer log-probabilities take: those of the first token for all,
    since all tokens have as many.
    """
    if not logprobs:
        return 0
    return len(logprobs) * (1 + len(logprobs[0].top_token_ids)) * _LOGPROB_BYTES
