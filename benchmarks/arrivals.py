"""When requests are sent: arrival processes, pure and seeded.

burst     all at once
constant  one every 1 / rate seconds
poisson   gaps drawn from an exponential distribution: independent users
gamma     gaps drawn from a gamma distribution; its shape is `burstiness`: 1 is poisson,
          less comes in clusters, more is steadier (the squared coefficient of variation
          is 1 / burstiness)
bursts    every `period_s` seconds, all requests of that period at once
trace     at the times that the workload has
"""

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, repeat

from baton.common.errors import ConfigurationError
from benchmarks.request import Workload

__all__ = [
    "ARRIVALS",
    "ArrivalProcess",
    "add_arrival_args",
    "add_rated_arrival_args",
    "arrivals_from_args",
]

ARRIVALS = ("burst", "constant", "poisson", "gamma", "bursts", "trace")
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "burst": (),
    "constant": ("request_rate",),
    "poisson": ("request_rate",),
    "gamma": ("request_rate", "burstiness"),
    "bursts": ("request_rate", "burst_period_s"),
    "trace": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalProcess:
    """An arrival process. The first request arrives at 0.

    Attributes:
        kind: one of `ARRIVALS`.
        request_rate: requests per second, on average.
        burstiness: shape of the gamma distribution.
        burst_period_s: seconds from burst to burst.
        seed: seed of all draws.

    Raises:
        ConfigurationError: a value is missing or out of range, or belongs to another kind.
    """

    kind: str
    request_rate: float | None = None
    burstiness: float | None = None
    burst_period_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ARRIVALS:
            raise ConfigurationError(
                f"--arrival is {self.kind!r}; it must be one of {', '.join(ARRIVALS)}"
            )
        for name in ("request_rate", "burstiness", "burst_period_s"):
            _check_parameter(self.kind, name, getattr(self, name))

    def apply(self, workload: Workload) -> Workload:
        """Returns the workload with times of arrival.

        Requests that wait for another request get no time.

        Raises:
            ConfigurationError: the process is "trace" and the workload has no times.
        """
        if self.kind == "trace":
            if not _is_timed(workload):
                raise ConfigurationError("--arrival trace needs a workload that has times")
            return workload
        times = self.times()
        requests = [
            replace(request, arrival_s=next(times) if request.after is None else None)
            for request in workload.requests
        ]
        return replace(workload, requests=requests)

    def times(self) -> Iterator[float]:
        """Yields times of arrival in seconds, ascending from 0, without end."""
        if self.kind == "burst":
            return repeat(0.0)
        assert self.request_rate is not None
        gap_s = 1 / self.request_rate
        if self.kind == "constant":
            return (index * gap_s for index in count())
        if self.kind == "bursts":
            assert self.burst_period_s is not None
            per_burst = self.request_rate * self.burst_period_s
            period_s = self.burst_period_s
            return (index // per_burst * period_s for index in count())
        return accumulate(chain([0.0], _gamma_gaps(gap_s, self.burstiness or 1.0, self.seed)))

    def __str__(self) -> str:
        figures = [f"{name} {getattr(self, name):g}" for name in _PARAMETERS[self.kind]]
        return ", ".join([self.kind, *figures]).replace("_", " ")


def add_arrival_args(parser: argparse.ArgumentParser) -> None:
    """Adds `--arrival`, `--request-rate` and the flags of single processes."""
    group = parser.add_argument_group("arrivals")
    group.add_argument(
        "--arrival",
        choices=ARRIVALS,
        help="how requests arrive (default: poisson with a --request-rate, else trace if the "
        "workload has times, else burst: all at once)",
    )
    group.add_argument("--request-rate", type=float, metavar="R", help="requests per second")
    _add_parameters(group)


def add_rated_arrival_args(parser: argparse.ArgumentParser) -> None:
    """Adds `--arrival` and the flags of single processes, for commands that set the rate."""
    group = parser.add_argument_group("arrivals")
    kinds = [kind for kind, names in _PARAMETERS.items() if "request_rate" in names]
    group.add_argument(
        "--arrival",
        choices=kinds,
        default="poisson",
        help="how requests arrive (default: %(default)s)",
    )
    _add_parameters(group)


def _add_parameters(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--burstiness",
        type=float,
        metavar="B",
        help="shape of gamma: 1 is poisson, less gives clusters, more is steadier",
    )
    group.add_argument(
        "--burst-period-s", type=float, metavar="S", help="seconds from one burst to the next"
    )


def arrivals_from_args(args: argparse.Namespace, workload: Workload) -> ArrivalProcess:
    """Returns the process that parsed flags describe, or the default for the workload.

    Raises:
        ConfigurationError: a flag is missing, out of range, or belongs to another process.
    """
    return ArrivalProcess(
        kind=args.arrival or _suitable_kind(args, workload),
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        burst_period_s=args.burst_period_s,
        seed=args.seed,
    )


def _suitable_kind(args: argparse.Namespace, workload: Workload) -> str:
    if args.request_rate is not None:
        return "poisson"
    return "trace" if _is_timed(workload) else "burst"


def _is_timed(workload: Workload) -> bool:
    return all(r.arrival_s is not None or r.after is not None for r in workload.requests)


def _check_parameter(kind: str, name: str, value: float | None) -> None:
    flag = f"--{name.replace('_', '-')}"
    is_own = name in _PARAMETERS[kind]
    if is_own and value is None:
        raise ConfigurationError(f"--arrival {kind} needs {flag}")
    if not is_own and value is not None:
        raise ConfigurationError(f"{flag} is {value:g}, but --arrival {kind} has none")
    if value is not None and not 0 < value < math.inf:
        raise ConfigurationError(f"{flag} is {value}; it must be > 0 and finite")


def _gamma_gaps(mean_s: float, shape: float, seed: int) -> Iterator[float]:
    source = random.Random(seed)
    while True:
        yield source.gammavariate(shape, mean_s / shape)
