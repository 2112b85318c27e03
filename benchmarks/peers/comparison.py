"""Compares engines: starts them, runs the cases in turn, and checks their tokens."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from baton.common.errors import ConfigurationError
from benchmarks.models import read_config
from benchmarks.peers.cases import PeerCase, build_cases, requests_of_round
from benchmarks.peers.catalogue import REFERENCE, NotMeasurableError, Setting, launch_of
from benchmarks.peers.peer_messages import PeerAnswer, PeerRun
from benchmarks.peers.peer_process import Launch, PeerProcess
from benchmarks.peers.rounds import Runs, take_turns
from benchmarks.peers.summary import summarize_agreement
from benchmarks.request import BenchRequest

__all__ = ["Comparison", "compare", "find_installed"]

_NUM_CHECKED = 2
"""Requests of each case whose tokens are compared with the reference's."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of a comparison.

    Attributes:
        engines: for each engine, its times to start, its peak memory, and how its tokens agree
            with the reference's, if that is installed.
        missing: the engines that are not installed, the reference included, and why.
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
    repeats: int,
    write_line: Callable[[str], None],
    before_round: Callable[[], None],
) -> Comparison:
    """Measures `engines` on the cases. Those that are not installed are left out.

    Args:
        engines: names of engines.
        case_names: names of cases in `build_cases`.
        setting: the settings of all engines.
        repeats: rounds that count.
        write_line: called with lines about the progress.
        before_round: called before each round that counts.

    Raises:
        ConfigurationError: an engine is unknown, or none is installed. No engine has started then.
        PeerError: an engine failed.
    """
    launches, missing = find_installed([*engines, REFERENCE], setting)
    reference = launches.pop(REFERENCE, None)
    if not launches:
        raise ConfigurationError("; ".join(missing.values()))
    for reason in missing.values():
        write_line(f"not measured: {reason}")
    vocab_size = read_config(setting.model)["vocab_size"]
    by_name = build_cases(vocab_size)
    cases = [by_name[name] for name in case_names]
    first = replace(by_name["batch-1"].requests[0], num_output_tokens=1)
    with ExitStack() as stack:
        peers, facts = {}, {}
        for launch in launches.values():
            write_line(f"starting {launch.engine} ...")
            peer = stack.enter_context(PeerProcess(launch))
            peers[launch.engine], facts[launch.engine] = peer, _start(peer, first)
        runs = take_turns(peers, cases, vocab_size, repeats, write_line, before_round)
        for name, peer in peers.items():
            facts[name]["peak_memory_mib"] = round(peer.peak_memory_bytes / (1 << 20))
    if reference is not None:
        write_line("the reference's tokens ...")
        expected = _reference_answers(reference, cases, vocab_size)
        for name, fact in facts.items():
            fact["agreement"] = summarize_agreement(_checked_answers(runs[name], cases), expected)
    return Comparison(facts, missing, cases, runs)


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
