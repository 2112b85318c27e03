"""What the scripts share: the tool, the form of the answer, and how cases run."""

import asyncio
import inspect
import json
import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

_FEW_TOKENS = 48
"""Enough for a form. A small model knows no end of an answer."""
QUESTION = "How is the weather in Rome?"


class Report(BaseModel):
    """A weather report."""

    city: str
    sky: Literal["sunny", "rainy"]


class Weather(BaseModel):
    """The arguments of the tool."""

    city: str


def weather(city: str) -> str:
    """Returns the weather of a city.

    Args:
        city: The city's name.
    """
    return f"It is sunny in {city}."


@dataclass(frozen=True)
class Server:
    """Where the cases run, and how many tokens an answer has at most."""

    url: str
    model: str
    max_tokens: int = 128


def run(
    cases: Mapping[str, Callable[[Server], Any]], tolerated: tuple[type[Exception], ...] = ()
) -> None:
    """Runs the cases of a script and prints what they return.

    On a small model, whose answers take long, it runs a third of them, the same ones each time.

    Args:
        cases: functions or coroutine functions by name.
        tolerated: what a framework raises if a model's answer is of no use to it.
    """
    url, model, *flags = sys.argv[1:]
    is_lenient = flags == ["--lenient"]
    server = Server(url, model, _FEW_TOKENS) if is_lenient else Server(url, model)
    # The JSON of an answer that is cut is malformed, which frameworks report in many ways.
    tolerated = (*tolerated, ValueError) if is_lenient else ()
    names = list(cases)
    if is_lenient:
        names = random.Random(0).sample(names, math.ceil(len(names) / 3))
    results: dict[str, Any] = {}
    for name in names:
        case = cases[name]
        try:
            result = case(server)
            results[name] = asyncio.run(result) if inspect.iscoroutine(result) else result
        except tolerated as error:
            if _is_of_server(error):
                raise
            results[name] = type(error).__name__
    print(json.dumps(results))


def _is_of_server(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised for, is an answer of the server."""
    while error is not None:
        if any(kind.__name__ == "APIError" for kind in type(error).__mro__):
            return True
        error = error.__cause__ or error.__context__
    return False


def report_of(value: Any) -> Any:
    """A report as JSON has it; other values as they are."""
    return value.model_dump() if isinstance(value, Report) else value
