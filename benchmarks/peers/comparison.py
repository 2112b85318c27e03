"""Compares engines: runs the cases in turn, summarizes the rounds, and checks the tokens.

Every case runs on every engine in turn, so that changes of the machine's speed affect all.

The agreement with greedy tokens of transformers in float32 is a sanity check. Rounding to bfloat16
changes near-ties, and random weights have many. So correct engines differ from the reference after
some tokens, and all their later tokens differ. An engine that differs at once on most prompts is
wrong.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from baton.common.errors import ConfigurationError
from benchmarks.model_cost import Ceilings, ModelShape
from benchmarks.peers.cases import Figure, PeerCase, build_cases, requests_of_round
from benchmarks.peers.catalogue import BATON, REFERENCE, SERVED_FORMS, forms_of, launch_of
from benchmarks.peers.environments import NotMeasurableError, Setting
from benchmarks.peers.peer_process import Launch, PeerAnswer, PeerError, PeerProcess, PeerRun
from benchmarks.request import BenchRequest

__all__ = [
    "Comparison",
    "RoundPeer",
    "Runs",
    "compare",
    "find_installed",
    "first_difference",
    "running",
    "summarize",
    "summarize_agreement",
    "take_turns",
]

_WARM_UP_SHARE = 4
"""The round that does not count has one in so many of each case's requests."""

Runs = dict[str, dict[str, list[PeerRun]]]
"""The runs by engine, then by case, in the order of the rounds."""
_NUM_CHECKED = 2
"""Requests of each case whose tokens are compared with the reference's."""


class RoundPeer(Protocol):
    """The part of `PeerProcess` that rounds use."""

    def run(self, requests: Sequence[BenchRequest]) -> PeerRun:
        """Runs the requests."""

    def reset(self) -> None:
        """Empties the engine's prefix caches."""

    def pause(self) -> None:
        """Stops the engine, so that it uses no CPU."""

    def resume(self) -> None:
        """Continues the engine."""


@contextmanager
def running(peer: RoundPeer) -> Iterator[RoundPeer]:
    """Continues a paused engine, and pauses it again at the end."""
    peer.resume()
    try:
        yield peer
    finally:
        peer.pause()


def take_turns(
    peers: Mapping[str, RoundPeer],
    cases: Sequence[PeerCase],
    vocab_size: int,
    repeats: int,
    write_line: Callable[[str], None],
    before_round: Callable[[], None],
) -> Runs:
    """Runs all cases `repeats` times, after a round with fewer requests that does not count.

    Args:
        peers: paused engines by name. One runs at a time.
        cases: the cases.
        vocab_size: the model's vocabulary.
        repeats: rounds that count.
        write_line: called with a line about each run.
        before_round: called before each round that counts, while all engines are paused.
    """
    runs: Runs = {name: {case.name: [] for case in cases} for name in peers}
    for number in range(1 + repeats):
        if number:
            before_round()
        for case in cases:
            requests = requests_of_round(case, number, vocab_size)
            if not number:
                requests = requests[: -(-len(requests) // _WARM_UP_SHARE)]
            for name in _rotated(list(peers), number):
                with running(peers[name]) as peer:
                    peer.reset()
                    run = peer.run(requests)
                write_line(
                    f"round {number} of {repeats}: {case.name} on {name}: {run.wall_s:.2f} s"
                )
                if number:
                    runs[name][case.name].append(run)
    return runs


def _rotated(names: Sequence[str], by: int) -> list[str]:
    """Returns the names in another order each round, so that no engine always follows another."""
    by %= len(names)
    return [*names[by:], *names[:by]]


def summarize(
    runs: Runs, cases: Sequence[PeerCase], shapes: Mapping[str, ModelShape], ceilings: Ceilings
) -> list[dict[str, Any]]:
    """Returns an entry for each figure of each case.

    An entry has the `case`, the `figure`, `is_less_better`, the `floor`, and by engine the `median`
    and all `values`. If the engines are Baton and at least one peer, it also has `best_peer`, and
    `baton_to_best_peer`: Baton's median over that peer's. `others` has the floor and the ratio of
    each other entry of Baton, which serves another form of the model or computes in another way.

    Args:
        runs: the runs.
        cases: the cases.
        shapes: by the names of Baton's entries, the size of the model that it served; always of
            "baton".
        ceilings: the machine's rates.
    """
    return [
        _entry(
            case,
            figure,
            {name: by_case[case.name] for name, by_case in runs.items()},
            shapes,
            ceilings,
        )
        for case in cases
        for figure in case.figures
    ]


def _entry(
    case: PeerCase,
    figure: Figure,
    runs: Mapping[str, Sequence[PeerRun]],
    shapes: Mapping[str, ModelShape],
    ceilings: Ceilings,
) -> dict[str, Any]:
    values = {
        name: [figure.of_run(case.requests, run) for run in own] for name, own in runs.items()
    }
    medians = {name: statistics.median(own) for name, own in values.items()}
    others = {
        baton: {"floor": round(figure.floor(case.requests, shape, ceilings), 2)}
        | _ratio(medians, baton, figure.is_less_better)
        for baton, shape in shapes.items()
    }
    main = others.pop(BATON)
    return {
        "case": case.name,
        "figure": figure.name,
        "is_less_better": figure.is_less_better,
        "median": {name: round(median, 2) for name, median in medians.items()},
        "values": {name: [round(value, 2) for value in own] for name, own in values.items()},
        **main,
        "others": others,
    }


def _ratio(medians: Mapping[str, float], baton: str, is_less_better: bool) -> dict[str, Any]:
    """Compares an entry of Baton with the other engines that serve the same form of the model."""
    form = SERVED_FORMS[baton]
    peers = [name for name in medians if name not in SERVED_FORMS and form in forms_of(name)]
    if baton not in medians or not peers:
        return {}
    best = (min if is_less_better else max)(peers, key=lambda name: medians[name])
    return {"best_peer": best, "baton_to_best_peer": round(medians[baton] / medians[best], 3)}


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Returns how many tokens agree before the first difference."""
    pairs = zip(tokens, expected, strict=True)
    return next((i for i, (token, other) in enumerate(pairs) if token != other), len(tokens))


def summarize_agreement(
    answers: Sequence[PeerAnswer], expected: Sequence[PeerAnswer]
) -> dict[str, object]:
    """Returns, for each prompt, the tokens before the first difference and all tokens."""
    agreeing = [
        first_difference(answer.token_ids, other.token_ids)
        for answer, other in zip(answers, expected, strict=True)
    ]
    return {"agreeing": agreeing, "of": [len(answer.token_ids) for answer in answers]}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of a comparison.

    Attributes:
        engines: for each engine, its times to start, its peak memory, and how its tokens agree
            with the reference's, if that is installed.
        missing: the engines that are not installed or cannot serve the model, the reference
            included, and why.
        cases: the cases.
        runs: the runs of the rounds that count.
    """

    engines: dict[str, dict[str, Any]]
    missing: dict[str, str]
    cases: Sequence[PeerCase]
    runs: Runs


def compare(
    engines: Sequence[str],
    case_names: Sequence[str],
    setting: Setting,
    vocab_size: int,
    repeats: int,
    write_line: Callable[[str], None],
    before_round: Callable[[], None],
) -> Comparison:
    """Measures `engines` on the cases. Those that are not installed are left out, and so are peers
    that fail before their first token, as they do with a model that they do not know.

    Args:
        engines: names of engines.
        case_names: names of cases in `build_cases`.
        setting: the settings of all engines.
        vocab_size: the model's vocabulary.
        repeats: rounds that count.
        write_line: called with lines about the progress.
        before_round: called before each round that counts.

    Raises:
        ConfigurationError: an engine is unknown, or none can be measured.
        PeerError: Baton failed, or a peer after its first token.
    """
    launches, missing = find_installed([*engines, REFERENCE], setting)
    reference = launches.pop(REFERENCE, None)
    if not launches:
        raise ConfigurationError("; ".join(missing.values()))
    for reason in missing.values():
        write_line(f"not measured: {reason}")
    by_name = build_cases(vocab_size)
    cases = [by_name[name] for name in case_names]
    first = replace(by_name["batch-1"].requests[0], num_output_tokens=1)
    with ExitStack() as stack:
        peers, facts, failed = _start_all(launches.values(), first, stack, write_line)
        missing |= failed
        if not peers:
            raise ConfigurationError("; ".join(missing.values()))
        runs = take_turns(peers, cases, vocab_size, repeats, write_line, before_round)
        for name, peer in peers.items():
            facts[name]["peak_memory_mib"] = round(peer.peak_memory_bytes / (1 << 20))
    if reference is not None:
        write_line("the reference's tokens ...")
        expected = _reference_answers(reference, cases, vocab_size)
        for name, fact in facts.items():
            fact["agreement"] = summarize_agreement(_checked_answers(runs[name], cases), expected)
    return Comparison(facts, missing, cases, runs)


def _start_all(
    launches: Iterable[Launch],
    first: BenchRequest,
    stack: ExitStack,
    write_line: Callable[[str], None],
) -> tuple[dict[str, PeerProcess], dict[str, dict[str, Any]], dict[str, str]]:
    """Returns the started engines, their times to start, and why peers could not be started."""
    peers, facts, failed = {}, {}, {}
    for launch in launches:
        name = launch.engine
        write_line(f"starting {name} ...")
        peer = stack.enter_context(PeerProcess(launch))
        try:
            facts[name] = _start(peer, first)
            peers[name] = peer
        except PeerError as error:
            if name in SERVED_FORMS:
                raise
            peer.close()
            failed[name] = f"{error.message.splitlines()[0]} (the log is {launch.log})"
            write_line(f"not measured: {failed[name]}")
    return peers, facts, failed


def find_installed(
    engines: Sequence[str], setting: Setting
) -> tuple[dict[str, Launch], dict[str, str]]:
    """Returns how to start the engines that are installed, and why others are not."""
    launches, missing = {}, {}
    for name in engines:
        try:
            launches[name] = launch_of(name, setting)
        except NotMeasurableError as error:
            missing[name] = error.message
    return launches, missing


def _start(peer: PeerProcess, first: BenchRequest) -> dict[str, Any]:
    """Waits for a new engine's first token, and pauses it; returns its times to start."""
    peer.wait_until_ready()
    loaded_s = peer.age_s
    peer.run([first])
    facts = {
        "description": peer.description,
        "start_to_loaded_s": round(loaded_s, 2),
        "start_to_first_token_s": round(peer.age_s, 2),
    }
    peer.pause()
    return facts


def _reference_answers(
    launch: Launch, cases: Sequence[PeerCase], vocab_size: int
) -> list[PeerAnswer]:
    """Returns the reference's tokens for the checked requests, which run alone, without padding."""
    requests = [
        request
        for case in cases
        for request in requests_of_round(case, 1, vocab_size)[:_NUM_CHECKED]
    ]
    with PeerProcess(launch) as peer:
        peer.wait_until_ready()
        return [peer.run([request]).answers[0] for request in requests]


def _checked_answers(
    runs: Mapping[str, Sequence[PeerRun]], cases: Sequence[PeerCase]
) -> list[PeerAnswer]:
    return [answer for case in cases for answer in runs[case.name][0].answers[:_NUM_CHECKED]]
