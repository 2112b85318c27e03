"""Command-line flags for `SamplingParams`, and the conversion of parsed flags."""

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from baton.common.request.sampling_params import PARAM_TYPES, SamplingParams
from baton.common.request.structured_outputs import StructuredOutputs

__all__ = ["add_sampling_args", "sampling_fields_from_args"]

_DEFAULTS = SamplingParams()
_EARLY_STOPPING: dict[str, bool | Literal["never"]] = {
    "true": True,
    "false": False,
    "never": "never",
}


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)


_bias.__name__ = "ID=BIAS"  # argparse names the type of a bad value by it


def _file(path: str) -> str:
    """Returns the text of a file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}") from None


_file.__name__ = "FILE"

_OUTPUTS = "structured_outputs"
"""A flag whose `dest` is this, a dot and a name sets that field of `StructuredOutputs`."""

_TEXTS = {"action": "append", "metavar": "TEXT"}
_FILE = {"type": _file, "metavar": "FILE"}
_ON = {"action": "store_true"}
_OPTIONS: Mapping[Any, dict[str, Any]] = {
    float | None: {"type": float, "metavar": "X"},
    int | None: {"type": int, "metavar": "N"},
    bool | None: {"action": argparse.BooleanOptionalAction},
    Sequence[int] | None: {"action": "append", "type": int, "metavar": "ID"},
    Sequence[str] | None: _TEXTS,
}
"""Options of a flag by the type of its field of `SamplingParams`."""
_OTHER_OPTIONS: Mapping[str, dict[str, Any]] = {
    "logit-bias": {"action": "append", "type": _bias, "metavar": "ID=BIAS"},
    "early-stopping": {"choices": _EARLY_STOPPING},
    "json-schema": {**_FILE, "dest": f"{_OUTPUTS}.json"},
    "json-object": {**_ON, "dest": f"{_OUTPUTS}.json_object"},
    "regex": {"metavar": "REGEX", "dest": f"{_OUTPUTS}.regex"},
    "choice": {**_TEXTS, "dest": f"{_OUTPUTS}.choice"},
    "grammar": {**_FILE, "dest": f"{_OUTPUTS}.grammar"},
    "structural-tag": {**_FILE, "dest": f"{_OUTPUTS}.structural_tag"},
    "disable-any-whitespace": {**_ON, "dest": f"{_OUTPUTS}.disable_any_whitespace"},
    "extra-args": {"metavar": "JSON"},
    "prediction": _FILE,
}
"""Options of the other flags."""
_ENTRIES = {
    "allowed-token-id": "allowed_token_ids",
    "bad-word": "bad_words",
    "stop-token-id": "stop_token_ids",
}
"""Flags that state one entry of a field, with that field."""
_HELP = {
    "temperature": "divisor of the logits; 0 is greedy decoding",
    "top-k": "draw from the k most likely tokens; 0 is all",
    "top-p": "draw from the most likely tokens up to this total probability",
    "min-p": "draw from tokens of at least this share of the highest probability",
    "repetition-penalty": "factor against tokens of the prompt and the output; 1 changes nothing",
    "presence-penalty": "subtracted from the logits of tokens in the output",
    "frequency-penalty": "the same, once for each time that the output has the token",
    "logit-bias": "added to the logit of a token; repeatable",
    "allowed-token-id": "draw only this token; repeatable",
    "bad-word": "never generate this text; repeatable",
    "seed": "seed that makes the result repeatable (default: random)",
    "max-tokens": "maximum number of tokens to generate",
    "min-tokens": "number of tokens before which the generation does not stop",
    "stop": "stop before this text; repeatable",
    "stop-token-id": "stop at this token; repeatable",
    "include-stop-str-in-output": "print the stop text too",
    "ignore-eos": "continue after the model's end-of-sequence token",
    "n": "number of candidates to return",
    "best-of": "number of candidates to generate; the n most likely ones are returned",
    "beam-width": "number of beams of a beam search (default: no beam search)",
    "length-penalty": "beam search: values above 0 prefer long texts",
    "early-stopping": "when beam search ends: with the first finished texts (true), when a better "
    "one is unlikely (false) or impossible (never) (default: false)",
    "logprobs": "log-probabilities of the tokens, and of the N likeliest at each place",
    "prompt-logprobs": "the same for the tokens of the prompt",
    "truncate-prompt-tokens": "keep only the last N tokens of the prompt; -1 keeps as many as fit",
    "json-schema": "JSON that the schema in this file accepts",
    "json-object": "any JSON object",
    "regex": "a text that this regular expression matches",
    "choice": "one of these texts; repeatable",
    "grammar": "a text of the grammar in this file, in Lark or GBNF",
    "structural-tag": "a text whose parts have the forms that the JSON in this file states",
    "disable-any-whitespace": "JSON without whitespace between its tokens",
    "thinking-token-budget": "maximum number of tokens of the reasoning part",
    "extra-args": "a JSON object with values for logits processors",
    "prediction": "the text of this file will probably be repeated; speeds up drafting",
    "skip-special-tokens": "leave special tokens out of the text",
    "spaces-between-special-tokens": "keep spaces between special tokens",
    "detokenize": "print text, not only the counts of tokens",
}
"""The flags, in their order, with their help."""


def add_sampling_args(
    parser: argparse.ArgumentParser, *, omit: Collection[str] = (), max_tokens: int | None = 128
) -> None:
    """Adds one flag per field of `SamplingParams`, and one per form of `structured_outputs`.

    The server's defaults hold for the flags that are not given, except for `--max-tokens`.

    Args:
        parser: gets the flags.
        omit: flags that are left out, without their dashes.
        max_tokens: default of `--max-tokens`; None leaves it to the server.
    """
    group = parser.add_argument_group("sampling")
    for flag, text in _HELP.items():
        if flag in omit:
            continue
        options = {"default": argparse.SUPPRESS, **_options_of(flag)}
        if flag == "max-tokens":
            options |= {} if max_tokens is None else {"default": max_tokens}
            default: Any = max_tokens or "the server decides"
        else:
            default = getattr(_DEFAULTS, flag.replace("-", "_"), None)
        note = "" if default in (None, (), "") or "(default" in text else f" (default: {default})"
        group.add_argument(f"--{flag}", **options, help=text + note)


def _options_of(flag: str) -> dict[str, Any]:
    if flag in _OTHER_OPTIONS:
        return _OTHER_OPTIONS[flag]
    field = _ENTRIES.get(flag, flag.replace("-", "_"))
    return {"dest": field, **_OPTIONS[PARAM_TYPES[field]]}


def sampling_fields_from_args(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` that parsed flags state."""
    given = vars(args)
    stated = {name: given[name] for name in SamplingParams.__slots__ if name in given}
    if "early_stopping" in stated:
        stated["early_stopping"] = _EARLY_STOPPING[stated["early_stopping"]]
    if "logit_bias" in stated:
        stated["logit_bias"] = dict(stated["logit_bias"])
    names = (field.name for field in fields(StructuredOutputs))
    form = {name: given[f"{_OUTPUTS}.{name}"] for name in names if f"{_OUTPUTS}.{name}" in given}
    if form:
        stated[_OUTPUTS] = form
    return stated
