"""`SummedMetrics`: the metrics of a router out of those of its processes. Pure.

- Counters and histograms are summed. What a process had counted when it was last asked stays in
  the sum when it ends, so that no counter goes back.
- Gauges of requests are summed, too. Those of what all processes see, such as replicas, are the
  largest ones; the table of a metric says so (`MetricInfo.across`).
- What describes a process, such as its memory, has the label `process`.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from baton.common.observe.metrics import MetricInfo

__all__ = ["SummedMetrics"]

_OF_A_PROCESS = ("process_", "python_", "baton_process_")
_MAX_ENDED_SERIES = 20_000
_Key = tuple[str, tuple[tuple[str, str], ...]]
"""The name of a sample, and its labels."""


@dataclass(slots=True)
class _Process:
    """The last answer of a process.

    Attributes:
        incarnation: differs from those of earlier processes in its place.
        families: its metrics by name.
        answers: whether it answered when it was last asked.
    """

    incarnation: str = ""
    families: dict[str, Metric] = field(default_factory=dict)
    answers: bool = True


@dataclass(slots=True)
class _Ended:
    """What ended processes had counted of a family.

    Attributes:
        family: its name, text and kind.
        values: by sample.
    """

    family: Metric
    values: dict[_Key, float] = field(default_factory=dict)


class SummedMetrics:
    """Adds up the metrics of processes.

    Args:
        infos: the tables of metrics by name. Metrics that are in none of them are summed.
    """

    def __init__(self, infos: Mapping[str, MetricInfo]) -> None:
        self._infos = infos
        self._processes: dict[int, _Process] = {}
        self._ended: dict[str, _Ended] = {}
        self._num_ended_series = 0

    def take(self, number: int, incarnation: str, text: str) -> None:
        """Takes the answer of a process.

        Args:
            number: of its place among the processes.
            incarnation: differs from that of an earlier process in this place.
            text: its metrics in Prometheus' text format.
        """
        process = self._processes.setdefault(number, _Process())
        if incarnation != process.incarnation:
            self._keep(process.families.values())
        families = {family.name: family for family in text_string_to_metric_families(text)}
        self._processes[number] = _Process(incarnation, families)

    def note_silence(self, number: int) -> None:
        """Notes that a process has not answered. Its counters stay as they were."""
        if number in self._processes:
            self._processes[number].answers = False

    def families(self) -> Iterator[Metric]:
        """Yields the metrics of the router."""
        names = dict.fromkeys(self._ended)
        for process in self._processes.values():
            names.update(dict.fromkeys(process.families))
        for name in names:
            if name.startswith(_OF_A_PROCESS):
                yield self._by_process(name)
            else:
                yield self._summed(name)

    def _keep(self, families: Iterable[Metric]) -> None:
        """Adds what an ended process has counted to what others had counted before it."""
        for family in families:
            if not _is_counted(family) or family.name.startswith(_OF_A_PROCESS):
                continue
            ended = self._ended.setdefault(family.name, _Ended(_empty(family)))
            for sample in family.samples:
                key = _key_of(sample)
                if key not in ended.values:
                    if self._num_ended_series >= _MAX_ENDED_SERIES:
                        continue
                    self._num_ended_series += 1
                ended.values[key] = ended.values.get(key, 0.0) + sample.value

    def _summed(self, name: str) -> Metric:
        info, ended = self._infos.get(name), self._ended.get(name)
        combine = max if info is not None and info.across == "max" else operator.add
        summed, values = None, {}
        if ended is not None:
            summed, values = _empty(ended.family), dict(ended.values)
        for process in self._processes.values():
            family = process.families.get(name)
            if family is None:
                continue
            summed = summed or _empty(family)
            for sample in family.samples if process.answers or _is_counted(family) else ():
                key = _key_of(sample)
                known = values.get(key)
                values[key] = sample.value if known is None else combine(known, sample.value)
        assert summed is not None, "the name is that of a family"
        for (sample_name, labels), value in values.items():
            summed.add_sample(sample_name, dict(labels), value)
        return summed

    def _by_process(self, name: str) -> Metric:
        labelled: Metric | None = None
        for number, process in sorted(self._processes.items()):
            family = process.families.get(name)
            if family is None:
                continue
            labelled = labelled or _empty(family)
            for sample in family.samples if process.answers else ():
                labels = {**sample.labels, "process": str(number)}
                labelled.add_sample(sample.name, labels, sample.value)
        assert labelled is not None, "the name is that of a family"
        return labelled


def _empty(family: Metric) -> Metric:
    return Metric(family.name, family.documentation, family.type)


def _is_counted(family: Metric) -> bool:
    """Whether its values only grow while a process lives."""
    return family.type in ("counter", "histogram")


def _key_of(sample: Sample) -> _Key:
    return sample.name, tuple(sample.labels.items())
