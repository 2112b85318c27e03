"""Command-line flags of `SamplingParams`, and the way back."""

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
        ("temperature", float, "divides the logits; 0 is greedy"),
        ("top-k", int, "keep only the k most likely tokens; 0 keeps all"),
        ("top-p", float, "keep the most likely tokens up to this probability"),
        ("max-tokens", int, "the most tokens to generate"),
        ("n", int, "how many candidates to return"),
        ("length-penalty", float, "beam search: above 0 prefers long texts"),
    ):
        default = getattr(_DEFAULTS, name.replace("-", "_"))
        group.add_argument(
            f"--{name}", type=kind, default=default, help=f"{text} (default: %(default)s)"
        )
    for name, text in (
        ("best-of", "generate this many candidates and return the n likeliest"),
        ("beam-width", "search with this many beams instead of drawing"),
    ):
        group.add_argument(f"--{name}", type=int, metavar="N", help=text)
    group.add_argument(
        "--early-stopping",
        choices=_EARLY_STOPPING,
        default="false",
        help="beam search ends with the first finished texts (true), when a better one is "
        "unlikely (false) or impossible (never) (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, help="makes the result repeatable (default: drawn)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop before it; repeatable"
    )
    group.add_argument(
        "--stop-token-id", action="append", type=int, default=[], metavar="ID", help="repeatable"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on past the model's end-of-sequence token"
    )


def sampling_params_from_args(args: argparse.Namespace) -> SamplingParams:
    """The parameters that parsed flags describe.

    Raises:
        InvalidArgumentError: a value is out of range; names the field.
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
