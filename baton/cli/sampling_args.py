"""Command-line flags for `SamplingParams`, and the conversion of parsed flags."""

import argparse
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from baton.common.request.sampling_params import SamplingParams
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

_INTEGER = {"type": int, "metavar": "N"}
_NUMBER = {"type": float, "metavar": "X"}
_SWITCH = {"action": argparse.BooleanOptionalAction}
_TEXTS = {"action": "append", "metavar": "TEXT"}
_TOKENS = {"action": "append", "type": int, "metavar": "ID"}
_FILE = {"type": _file, "metavar": "FILE"}
_ON = {"action": "store_true"}
_BIASES = {"action": "append", "type": _bias, "metavar": "ID=BIAS"}

_FLAGS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("temperature", _NUMBER, "divisor of the logits; 0 is greedy decoding"),
    ("top-k", _INTEGER, "draw from the k most likely tokens; 0 is all"),
    ("top-p", _NUMBER, "draw from the most likely tokens up to this total probability"),
    ("min-p", _NUMBER, "draw from tokens of at least this share of the highest probability"),
    (
        "repetition-penalty",
        _NUMBER,
        "factor against tokens of the prompt and the output; 1 changes nothing",
    ),
    ("presence-penalty", _NUMBER, "subtracted from the logits of tokens in the output"),
    ("frequency-penalty", _NUMBER, "the same, once for each time that the output has the token"),
    ("logit-bias", _BIASES, "added to the logit of a token; repeatable"),
    (
        "allowed-token-id",
        {**_TOKENS, "dest": "allowed_token_ids"},
        "draw only this token; repeatable",
    ),
    ("bad-word", {**_TEXTS, "dest": "bad_words"}, "never generate this text; repeatable"),
    ("seed", _INTEGER, "seed that makes the result repeatable (default: random)"),
    ("max-tokens", _INTEGER, "maximum number of tokens to generate"),
    ("min-tokens", _INTEGER, "number of tokens before which the generation does not stop"),
    ("stop", _TEXTS, "stop before this text; repeatable"),
    ("stop-token-id", {**_TOKENS, "dest": "stop_token_ids"}, "stop at this token; repeatable"),
    ("include-stop-str-in-output", _SWITCH, "print the stop text too"),
    ("ignore-eos", _SWITCH, "continue after the model's end-of-sequence token"),
    ("n", _INTEGER, "number of candidates to return"),
    (
        "best-of",
        _INTEGER,
        "number of candidates to generate; the n most likely ones are returned",
    ),
    ("beam-width", _INTEGER, "number of beams of a beam search (default: no beam search)"),
    ("length-penalty", _NUMBER, "beam search: values above 0 prefer long texts"),
    (
        "early-stopping",
        {"choices": _EARLY_STOPPING},
        "when beam search ends: with the first finished texts (true), when a better one is "
        "unlikely (false) or impossible (never) (default: false)",
    ),
    ("logprobs", _INTEGER, "log-probabilities of the tokens, and of the N likeliest at each place"),
    ("prompt-logprobs", _INTEGER, "the same for the tokens of the prompt"),
    (
        "truncate-prompt-tokens",
        _INTEGER,
        "keep only the last N tokens of the prompt; -1 keeps as many as fit",
    ),
    (
        "json-schema",
        {**_FILE, "dest": f"{_OUTPUTS}.json"},
        "JSON that the schema in this file accepts",
    ),
    ("json-object", {**_ON, "dest": f"{_OUTPUTS}.json_object"}, "any JSON object"),
    (
        "regex",
        {"metavar": "REGEX", "dest": f"{_OUTPUTS}.regex"},
        "a text that this regular expression matches",
    ),
    ("choice", {**_TEXTS, "dest": f"{_OUTPUTS}.choice"}, "one of these texts; repeatable"),
    (
        "grammar",
        {**_FILE, "dest": f"{_OUTPUTS}.grammar"},
        "a text of the grammar in this file, in Lark or GBNF",
    ),
    (
        "structural-tag",
        {**_FILE, "dest": f"{_OUTPUTS}.structural_tag"},
        "a text whose parts have the forms that the JSON in this file states",
    ),
    (
        "disable-any-whitespace",
        {**_ON, "dest": f"{_OUTPUTS}.disable_any_whitespace"},
        "JSON without whitespace between its tokens",
    ),
    ("thinking-token-budget", _INTEGER, "maximum number of tokens of the reasoning part"),
    ("extra-args", {"metavar": "JSON"}, "a JSON object with values for logits processors"),
    ("prediction", _FILE, "the text of this file will probably be repeated; speeds up drafting"),
    ("skip-special-tokens", _SWITCH, "leave special tokens out of the text"),
    ("spaces-between-special-tokens", _SWITCH, "keep spaces between special tokens"),
    ("detokenize", _SWITCH, "print text, not only the counts of tokens"),
)
"""Per field of `SamplingParams`: its flag, the flag's options, its help."""


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
    for flag, given_options, text in _FLAGS:
        if flag in omit:
            continue
        options = {"default": argparse.SUPPRESS, **given_options}
        if flag == "max-tokens":
            options |= {} if max_tokens is None else {"default": max_tokens}
            default: Any = max_tokens or "the server decides"
        else:
            default = getattr(_DEFAULTS, flag.replace("-", "_"), None)
        note = "" if default in (None, (), "") or "(default" in text else f" (default: {default})"
        group.add_argument(f"--{flag}", **options, help=text + note)


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
