"""The tokenizer in a GGUF file, built with the `tokenizers` package.

`tokenizer.ggml.model` has two supported kinds. `gpt2` is byte-level BPE: `tokenizer.ggml.pre`
names the rule that splits a text into words. `llama` is BPE as SentencePiece does it: a
token's score is its priority, a space is written as U+2581, and characters without a token are
encoded as bytes.
"""

from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from baton.common.model_files.gguf.header import GgufHeader
from baton.common.model_files.gguf.word_rules import word_rule
from baton.common.model_files.tokenizer_steps import DUPLICATE_MARK, mark_duplicates

__all__ = ["build_tokenizer", "tokenizer_config_json"]

_KEYS = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPACE = "\u2581"
_MAX_PIECE_CHARS = 1024
"""The longest piece of SentencePiece's kind; the cost of its merges grows as its length squared."""
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def build_tokenizer(header: GgufHeader) -> tokenizers.Tokenizer:
    """Builds the tokenizer of a file.

    Raises:
        ConfigurationError: its kind is not supported, or the vocabulary is missing or malformed;
            names the key.
    """
    tokens = _list(header, "tokens")
    types = header.metadata.get(f"{_KEYS}token_type", [])
    if types and len(types) != len(tokens):
        raise header.refuse(f"{_KEYS}token_type has {len(types)} entries for {len(tokens)} tokens")
    kind = header.metadata.get(f"{_KEYS}model")
    num_used = _num_used(tokens, types)
    added = _added_ids(header, types, num_used)
    texts = mark_duplicates(tokens[:num_used], added)
    vocabulary = {text: token_id for token_id, text in enumerate(texts)}
    if kind == "gpt2":
        backend = _byte_level_bpe(header, vocabulary)
    elif kind == "llama":
        backend = _sentencepiece_bpe(header, vocabulary)
    else:
        raise header.refuse(f"{_KEYS}model {kind!r} is not supported; supported are gpt2, llama")
    if texts != tokens[:num_used]:
        backend.decoder = decoders.Sequence([decoders.Replace(DUPLICATE_MARK, ""), backend.decoder])
    backend.add_tokens(
        [
            AddedToken(texts[token_id], special=is_special, normalized=False)
            for token_id, is_special in added.items()
        ]
    )
    backend.post_processor = _post_processor(header, tokens, kind)
    return backend


def tokenizer_config_json(header: GgufHeader) -> dict[str, Any]:
    """Returns special tokens and chat templates under tokenizer_config.json's names."""
    ids = {name: header.token_id(role) for role, name in _ROLES.items()}
    config: dict[str, Any] = {
        f"{name}_token": header.tokens[token_id]
        for name, token_id in ids.items()
        if token_id is not None
    }
    templates = _chat_templates(header)
    if set(templates) == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
    return config


def _chat_templates(header: GgufHeader) -> dict[str, str]:
    """Returns the templates by name; the unnamed one is `default`."""
    key = "tokenizer.chat_template"
    templates = {"default": header.metadata[key]} if key in header.metadata else {}
    templates |= {
        name.removeprefix(f"{key}."): text
        for name, text in header.metadata.items()
        if name.startswith(f"{key}.")
    }
    return templates


def _list(header: GgufHeader, key: str) -> list[Any]:
    value = header.metadata.get(_KEYS + key)
    if not isinstance(value, list) or not value:
        raise header.refuse(f"it has no {_KEYS}{key}")
    return value


def _num_used(tokens: list[str], types: list[int]) -> int:
    """Returns the number of tokens without the unused ones at the end, which fill up a matrix."""
    count = len(tokens)
    while types and count and types[count - 1] == _UNUSED:
        count -= 1
    return count


def _byte_level_bpe(header: GgufHeader, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    rule = word_rule(header)
    merges = [tuple(merge.split(" ")) for merge in _list(header, "merges")]
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise header.refuse(f"{_KEYS}merges has {' '.join(pair)!r}, which are no two tokens")
    model = models.BPE(vocabulary, merges, ignore_merges=rule.takes_whole_words)
    backend = tokenizers.Tokenizer(model)
    if rule.is_normalized:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(header: GgufHeader, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    tokens = _list(header, "tokens")
    scores = _list(header, "scores")
    if len(scores) != len(tokens):
        raise header.refuse(f"{_KEYS}scores has {len(scores)} entries for {len(tokens)} tokens")
    types = header.metadata.get(f"{_KEYS}token_type") or [1] * len(tokens)
    pieces = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind not in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
    }
    longest = max(pieces, key=len, default="")
    if len(longest) > _MAX_PIECE_CHARS:
        raise header.refuse(
            f"{_KEYS}tokens has {longest[:20]!r}... of {len(longest)} characters; "
            f"a token must have at most {_MAX_PIECE_CHARS}"
        )
    model = models.BPE(
        vocabulary,
        _merges(pieces),
        unk_token=tokens[header.token_id("unknown") or 0],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    has_prefix = header.metadata.get(f"{_KEYS}add_space_prefix", True)
    replaced = normalizers.Replace(" ", _SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), replaced]) if has_prefix else replaced
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Returns the merges that build each piece from two others, best pieces first."""
    merges = [
        (score, len(left), len(right), left, right)
        for piece, score in scores.items()
        for left, right in ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        if left in scores and right in scores
    ]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in merges]


def _added_ids(header: GgufHeader, types: list[int], num_used: int) -> dict[int, bool]:
    """Returns the tokens that are found in a text before it is split, and whether they are
    special, which hides them from texts.
    """
    named = {header.token_id(role) for role in ("bos", "eos")}
    kinds = types[:num_used] or [1] * num_used
    return {
        token_id: kind != _USER_DEFINED or token_id in named
        for token_id, kind in enumerate(kinds)
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) or token_id in named
    }


def _post_processor(
    header: GgufHeader, tokens: list[str], kind: str
) -> processors.TemplateProcessing:
    """Adds BOS and EOS where the file's flags say so, or its kind of tokenizer does."""
    by_default = kind == "llama" or word_rule(header).adds_bos
    defaults = {"bos": by_default and header.token_id("bos") is not None, "eos": False}
    affixes: dict[str, list[str]] = {"bos": [], "eos": []}
    for role, default in defaults.items():
        if header.metadata.get(f"{_KEYS}add_{role}_token", default):
            token_id = header.token_id(role)
            if token_id is None:
                raise header.refuse(f"it has {_KEYS}add_{role}_token and no such token")
            affixes[role] = [tokens[token_id]]
    return processors.TemplateProcessing(
        single=[*affixes["bos"], "$A", *affixes["eos"]],
        special_tokens=[
            (tokens[token_id], token_id)
            for role in affixes
            if affixes[role] and (token_id := header.token_id(role)) is not None
        ],
    )
