"""Measures engines beside each other: starts them, runs the cases in turn, sums up."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from benchmarks.models import read_config
from benchmarks.peers.agreement import summarize_agreement
from benchmarks.peers.cases import Case, build_cases
from benchmarks.peers.catalogue import REFERENCE, Setting, launch_of
from benchmarks.peers.model_cost import Ceilings, ModelShape
from benchmarks.peers.peer_messages import PeerAnswer
from benchmarks.peers.peer_process import Launch, PeerProcess
from benchmarks.peers.rounds import Runs, take_turns
from benchmarks.peers.summary import summarize
from benchmarks.request import BenchRequest

__all__ = ["compare"]

_NUM_CHECKED = 2
"""Requests of each case whose tokens are held against the reference's."""


def compare(
    engines: Sequence[str],
    case_names: Sequence[str],
    setting: Setting,
    repeats: int,
    shape: ModelShape,
    ceilings: Ceilings,
) -> dict[str, Any]:
    """Measures `engines` on the cases.

    Returns:
        `engines`: what each took to start, its peak memory and how its tokens agree
        with the reference's; `figures`: see `summarize`.

    Raises:
        ConfigurationError: an engine is unknown or not installed; told before anything starts.
        PeerError: an engine failed.
    """
    launches = {name: launch_of(name, setting) for name in engines}
    by_name = build_cases(read_config(setting.model)["vocab_size"])
    cases = [by_name[name] for name in case_names]
    _tell("the reference's tokens ...")
    expected = _reference_answers(launch_of(REFERENCE, setting), cases)
    first = replace(by_name["batch-1"].requests[0], num_output_tokens=1)
    with ExitStack() as stack:
        peers, facts = {}, {}
        for name, launch in launches.items():
            _tell(f"starting {name} ...")
            peers[name] = stack.enter_context(PeerProcess(launch))
            facts[name] = _start(peers[name], first)
        runs = take_turns(peers, cases, repeats, _tell)
        for name, peer in peers.items():
            facts[name]["peak_memory_mib"] = round(peer.peak_memory_bytes / (1 << 20))
    for name, fact in facts.items():
        fact["agreement"] = summarize_agreement(_checked_answers(runs, name, cases), expected)
    return {"engines": facts, "figures": summarize(runs, cases, shape, ceilings)}


def _start(peer: PeerProcess, first: BenchRequest) -> dict[str, Any]:
    """Waits for a new engine's first token, and pauses it; what it took."""
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


def _reference_answers(launch: Launch, cases: Sequence[Case]) -> list[PeerAnswer]:
    """Each checked request alone: no padding, no neighbours."""
    with PeerProcess(launch) as peer:
        peer.wait_until_ready()
        return [
            peer.run([request]).answers[0]
            for case in cases
            for request in case.requests[:_NUM_CHECKED]
        ]


def _checked_answers(runs: Runs, engine: str, cases: Sequence[Case]) -> list[PeerAnswer]:
    return [
        answer for case in cases for answer in runs[engine][case.name][0].answers[:_NUM_CHECKED]
    ]


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
