"""`baton tune` apart from its search: points, the driver, tokens, the printed command."""

import argparse
from contextlib import asynccontextmanager

import pytest

from baton.cli import main
from baton.cli.serve import add_args as add_serve_args
from baton.common.errors import ConfigurationError
from benchmarks.load import LoadLimits
from benchmarks.metrics import ServiceLevel
from benchmarks.request import BenchRequest, with_fresh_tokens
from benchmarks.tune import driver
from benchmarks.tune.search import Candidate, Point, Trial, best_points, curve_of
from benchmarks.tune_command import serve_command
from engine.config import EngineConfig

FIRST = Candidate(64, 2048, None, 1, 1)
SECOND = Candidate(32, 2048, 256, 1, 1)
ENGINE = EngineConfig(model="/models/some", block_size=8)


def point(candidate, rate, goodput):
    return Point(candidate, rate, goodput, 1.0, 10.0, 1.0, 0)


def test_best_points_has_the_best_point_of_each_candidate():
    points = [point(FIRST, 1, 1), point(FIRST, 2, 2), point(SECOND, 2, 3), point(FIRST, 4, 2)]
    assert best_points(points) == [points[2], points[1]]
    assert curve_of([points[3], points[0]], FIRST) == [points[0], points[3]]


def test_fresh_tokens_keep_shared_prefixes_and_differ_between_numbers():
    requests = [BenchRequest((1, 2, 3), 4), BenchRequest((1, 2, 9), 5, after=0)]
    first, second = with_fresh_tokens(requests, 1, 10)
    assert first.prompt_token_ids[:2] == second.prompt_token_ids[:2]
    assert first.prompt_token_ids[2] != second.prompt_token_ids[2]
    assert (second.num_output_tokens, second.after) == (5, 0)
    assert all(0 <= token < 10 for token in second.prompt_token_ids)
    beginnings = {with_fresh_tokens(requests, n, 10)[0].prompt_token_ids[0] for n in range(10)}
    assert len(beginnings) == 10
    assert with_fresh_tokens(requests, 0, 10) == requests


def test_the_printed_command_is_parsed_to_the_candidate():
    program, command, *arguments = serve_command(ENGINE, Candidate(32, 1024, 256, 0, 3)).split()
    assert (program, command) == ("baton", "serve")
    parser = argparse.ArgumentParser()
    add_serve_args(parser)
    args = parser.parse_args(arguments)
    assert (args.prefill_workers, args.decode_workers, args.model) == (0, 3, "/models/some")
    assert args.block_size == 8
    limits = (args.max_num_seqs, args.max_num_batched_tokens, args.long_prefill_token_threshold)
    assert limits == (32, 1024, 256)


class FakeLoad(driver.TuneLoad):
    """Measures without sending; records the cluster and the number of each measurement."""

    async def measure(self, target, trial, number):
        MEASUREMENTS.append((target, number))
        return point(trial.candidate, trial.request_rate, trial.request_rate)


MEASUREMENTS: list = []


@pytest.fixture
def clusters(monkeypatch):
    """Returns the configs of started clusters. A cluster for a single sequence cannot start."""
    MEASUREMENTS.clear()
    started = []

    @asynccontextmanager
    async def running_cluster(config):
        if config.engine.max_num_seqs == 1:
            raise ConfigurationError("decode-0 could not start")
        started.append(config)
        yield type("Plan", (), {"router": type("Router", (), {"address": str(len(started))})})

    @asynccontextmanager
    async def opened_target(url, model):
        yield url

    monkeypatch.setattr(driver, "running_cluster", running_cluster)
    monkeypatch.setattr(driver, "opened_target", opened_target)
    return started


def load():
    return FakeLoad(argparse.Namespace(), ServiceLevel(), LoadLimits(None, 1.0))


def search(*trials):
    """Yields the given trials regardless of their goodput."""
    pending = list(trials)
    while pending:
        goodput = yield pending.pop(0)
        assert goodput is not None


async def run(*trials, time_budget_s=60.0):
    lines = []
    points = await driver.run_search(search(*trials), ENGINE, load(), time_budget_s, lines.append)
    assert len(lines) == len(points)
    return points


async def test_a_cluster_runs_until_the_candidate_changes(clusters):
    await run(Trial(FIRST, 1), Trial(FIRST, 2), Trial(SECOND, 2), Trial(FIRST, 3))
    assert [config.engine.max_num_seqs for config in clusters] == [64, 32, 64]
    assert MEASUREMENTS == [("grpc://1", 0), ("grpc://1", 1), ("grpc://2", 0), ("grpc://3", 0)]
    assert clusters[1].engine.long_prefill_token_threshold == 256
    assert clusters[0].engine.kv_connector
    assert clusters[0].engine.num_threads is None  # None means all cores, as in `baton serve`


async def test_a_candidate_that_does_not_start_has_no_goodput(clusters):
    broken = Candidate(1, 2048, None, 1, 1)
    points = await run(Trial(FIRST, 1), Trial(broken, 1), Trial(broken, 2), Trial(FIRST, 2))
    assert [p.goodput for p in points] == [1, 0, 0, 2]
    with pytest.raises(ConfigurationError, match="could not start"):
        await run(Trial(broken, 1))


async def test_only_the_first_trial_runs_without_a_time_budget(clusters):
    points = await run(Trial(FIRST, 1), Trial(FIRST, 2), time_budget_s=0.0)
    assert [p.request_rate for p in points] == [1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--goodput", "ttft:no"), "--goodput has 'ttft:no'"),
        (("--goodput", "ttft:9", "--num-workers", "0"), "--num-workers is 0"),
        (("--goodput", "ttft:9", "--start-rate", "0"), "--start-rate is 0"),
        (("--goodput", "ttft:9", "--html", "/no/where/x"), "--html is /no/where/x"),
        (("--goodput", "ttft:9", "--max-num-seqs", "0"), "--max-num-seqs is 0"),
    ],
)
def test_bad_flags_are_refused_before_anything_starts(flags, message, capsys):
    assert main(["tune", *flags]) == 2
    assert message in capsys.readouterr().err
