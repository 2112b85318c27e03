"""Command-line flags for `SamplingParams`, and the conversion of parsed flags."""

import argparse
from typing import Literal

from baton.sampling_params import SamplingParams

__all__ = ["add_sampling_args", "sampling_params_from_args"]

_DEFAULTS = SamplingParams(max_tokens=128)
_EARLY_STOPPING: dict[str, bool | Literal["never"]] = {
    "true": True,
    "false": False,
    "never": "never",
}


def add_sampling_args(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per field of `SamplingParams`."""
    group = parser.add_argument_group("sampling")
    for name, kind, text in (
        ("temperature", float, "divisor of the logits; 0 is greedy decoding"),
        ("top-k", int, "draw from the k most likely tokens; 0 is all"),
        ("top-p", float, "draw from the most likely tokens up to this total probability"),
        ("max-tokens", int, "maximum number of tokens to generate"),
        ("n", int, "number of candidates to return"),
        ("length-penalty", float, "beam search: values above 0 prefer long texts"),
    ):
        default = getattr(_DEFAULTS, name.replace("-", "_"))
        group.add_argument(
            f"--{name}", type=kind, default=default, help=f"{text} (default: %(default)s)"
        )
    for name, text in (
        ("best-of", "number of candidates to generate; the n most likely ones are returned"),
        ("beam-width", "number of beams of a beam search (default: no beam search)"),
    ):
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    group.add_argument(
        "--early-stopping",
        choices=_EARLY_STOPPING,
        default="false",
        help="when beam search ends: with the first finished texts (true), when a better one is "
        "unlikely (false) or impossible (never) (default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=int, help="seed that makes the result repeatable (default: random)"
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; repeatable",
    )
    group.add_argument(
        "--stop-token-id",
        action="append",
        type=int,
        default=[],
        metavar="ID",
        help="stop at this token; repeatable",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="continue after the model's end-of-sequence token"
    )


def sampling_params_from_args(args: argparse.Namespace) -> SamplingParams:
    """Makes the parameters from parsed flags.

    Raises:
        InvalidArgumentError: a value is out of range; the message names the field.
    """
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=args.stop,
        stop_token_ids=args.stop_token_id,
        ignore_eos=args.ignore_eos,
        n=args.n,
        best_of=args.best_of,
        beam_width=args.beam_width,
        length_penalty=args.length_penalty,
        early_stopping=_EARLY_STOPPING[args.early_stopping],
    )
