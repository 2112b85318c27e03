"""The metrics of a router out of those of its processes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from baton.common.observe.metrics import MetricInfo, Metrics
from baton.common.observe.metrics_collector import MetricsCollector
from router.processes.summed_metrics import SummedMetrics

TABLE = {
    "baton_done": MetricInfo("counter", "Done.", {"tenant": None}),
    "baton_running": MetricInfo("gauge", "Running."),
    "baton_replicas": MetricInfo("gauge", "Replicas.", across="max"),
    "baton_seconds": MetricInfo("histogram", "Times.", buckets=(1.0, 2.0)),
    "baton_process_lag": MetricInfo("gauge", "Lag."),
}


class Processes:
    """Processes with metrics, and what a reader of their sum sees."""

    def __init__(self) -> None:
        self.summed = SummedMetrics(TABLE)
        self.metrics: dict[int, Metrics] = {}
        self._num_started = 0
        self._incarnations: dict[int, str] = {}

    def start(self, number: int) -> Metrics:
        self._num_started += 1
        self._incarnations[number] = str(self._num_started)
        self.metrics[number] = Metrics(TABLE)
        return self.metrics[number]

    def read(self, *silent: int) -> str:
        for number, metrics in self.metrics.items():
            if number in silent:
                self.summed.note_silence(number)
                continue
            registry = CollectorRegistry()
            registry.register(MetricsCollector(metrics))
            text = generate_latest(registry).decode()
            self.summed.take(number, self._incarnations[number], text)
        return shown(self.summed)


def shown(summed: SummedMetrics) -> str:
    class Families(Collector):
        def collect(self):
            return summed.families()

    registry = CollectorRegistry()
    registry.register(Families())
    return generate_latest(registry).decode()


def test_counts_are_summed_and_what_describes_a_process_is_labelled():
    processes = Processes()
    for number in range(2):
        metrics = processes.start(number)
        metrics.add("baton_done", number + 1, "a")
        metrics.set("baton_running", 3 + number)
        metrics.set("baton_replicas", 5)
        metrics.set("baton_process_lag", number)
        metrics.observe("baton_seconds", 0.5 + number)
    processes.metrics[1].add("baton_done", 1, "b")
    text = processes.read()
    assert 'baton_done_total{tenant="a"} 3.0' in text
    assert 'baton_done_total{tenant="b"} 1.0' in text
    assert "\nbaton_running 7.0" in text
    assert "\nbaton_replicas 5.0" in text
    assert 'baton_process_lag{process="0"} 0.0' in text
    assert 'baton_process_lag{process="1"} 1.0' in text
    buckets = [line for line in text.splitlines() if line.startswith("baton_seconds_bucket")]
    assert [line.split()[-1] for line in buckets] == ["1.0", "2.0", "2.0"]
    assert "baton_seconds_sum 2.0" in text


def test_gauges_of_a_process_that_does_not_answer_are_left_out():
    processes = Processes()
    for number in range(2):
        metrics = processes.start(number)
        metrics.set("baton_running", 2)
        metrics.add("baton_done", 2, "a")
    processes.read()
    text = processes.read(1)
    assert "\nbaton_running 2.0" in text
    assert 'baton_done_total{tenant="a"} 4.0' in text
    assert 'process="1"' not in text


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["count", "restart", "read", "silence"]),
            st.integers(0, 2),
            st.integers(1, 5),
        ),
        max_size=40,
    )
)
def test_no_counter_goes_back_and_what_was_read_once_stays(events):
    processes, last = Processes(), Counter[str]()
    kept, seen = 0, dict.fromkeys(range(3), 0)
    counted = dict.fromkeys(range(3), 0)
    for number in range(3):
        processes.start(number)
    for event, number, amount in events:
        if event == "count":
            processes.metrics[number].add("baton_done", amount, "a")
            processes.metrics[number].observe("baton_seconds", amount)
            counted[number] += amount
        elif event == "restart":
            processes.start(number)
            kept, seen[number], counted[number] = kept + seen[number], 0, 0
        else:
            silent = (number,) if event == "silence" else ()
            text = processes.read(*silent)
            for process in set(range(3)) - set(silent):
                seen[process] = counted[process]
            values = Counter[str]()
            for line in text.splitlines():
                name, _, value = line.rpartition(" ")
                if name.startswith(("baton_done_total", "baton_seconds_")):
                    values[name] = float(value)
            assert values['baton_done_total{tenant="a"}'] == kept + sum(seen.values())
            assert all(values[name] >= value for name, value in last.items())
            last = values
