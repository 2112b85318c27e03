"""The results of one part of a run, written line by line, and the time that it has left."""

import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kernels.cost import Cost
from benchmarks.model_cost import Ceilings

__all__ = ["Record", "TimeLeft", "read_record", "summary"]

_MAX_SAMPLES_KEPT = 40


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """The time until a moment of `time.monotonic`."""

    ends_at: float

    @classmethod
    def of(cls, seconds: float) -> "TimeLeft":
        """Returns the time that ends `seconds` from now."""
        return cls(time.monotonic() + seconds)

    @property
    def seconds(self) -> float:
        """Seconds left, 0 if the time is over."""
        return max(0.0, self.ends_at - time.monotonic())


class Record:
    """Results of one part, appended to a file one by one, so that a crash loses none of them.

    Args:
        path: a file of JSON lines.
        left: the time that the part has left.
    """

    def __init__(self, path: Path, left: TimeLeft) -> None:
        self._path, self.left = path, left

    def add(self, kind: str, name: str, **fields: Any) -> None:
        """Adds one result: its kind, its name and its figures."""
        with self._path.open("a") as lines:
            lines.write(json.dumps({"kind": kind, "name": name, **fields}) + "\n")

    def attempt(self, kind: str, name: str, measure: Callable[[], dict[str, Any]]) -> bool:
        """Adds the figures that `measure` returns, or why there are none.

        Returns:
            Whether there are figures.
        """
        if not self.left.seconds:
            self.add(kind, name, failed="no time was left")
            return False
        started = time.perf_counter()
        try:
            fields = measure()
        except Exception as error:  # any error ends this measurement, but not the part
            self.add(kind, name, failed=_in_words(error), traceback=traceback.format_exc())
            return False
        self.add(kind, name, **fields, took_s=round(time.perf_counter() - started, 2))
        return "skipped" not in fields and "failed" not in fields


def read_record(path: Path) -> list[dict[str, Any]]:
    """Returns the results in a record's file, without incomplete lines."""
    results = []
    for line in path.read_text().splitlines():
        try:
            results.append(json.loads(line))
        except ValueError:
            continue
    return results


def summary(
    samples_s: Sequence[float], cost: Cost | None = None, ceilings: Ceilings | None = None
) -> dict[str, Any]:
    """Returns samples and their median in microseconds, and rates beside the ceilings.

    Args:
        samples_s: seconds of a call, at least one sample.
        cost: bytes and operations of a call.
        ceilings: the rates of the device.
    """
    median_s = statistics.median(samples_s)
    kept = _evenly(samples_s)
    figures: dict[str, Any] = {
        "median_us": _rounded(1e6 * median_s),
        "samples_us": [_rounded(1e6 * sample) for sample in kept],
        "num_samples": len(samples_s),
    }
    if cost is not None:
        figures["gb_per_s"] = _rounded(cost.num_bytes / median_s / 1e9)
        figures["tflop_per_s"] = _rounded(cost.num_operations / median_s / 1e12)
    if cost is not None and ceilings is not None:
        of_bytes = cost.num_bytes / ceilings.read_bytes_per_s
        of_operations = cost.num_operations / ceilings.operations_per_s
        figures["limit"] = "bytes" if of_bytes >= of_operations else "operations"
        figures["share_of_ceiling"] = _rounded(max(of_bytes, of_operations) / median_s)
    return figures


def _evenly(samples_s: Sequence[float]) -> Iterable[float]:
    """Returns at most `_MAX_SAMPLES_KEPT` samples, spread over all of them."""
    stride = -(-len(samples_s) // _MAX_SAMPLES_KEPT)
    return samples_s[::stride]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1000]
