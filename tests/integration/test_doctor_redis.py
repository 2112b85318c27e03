"""`baton doctor` on real redis servers: a true verdict, and nothing changed."""

from contextlib import closing

import pytest

from baton.doctor import Level
from baton.doctor.connectors import check_store
from kvstore.conformance.objects import filled, random_keys
from kvstore.registry import open_store
from tests.support.redis_deployments import ask
from tests.support.redis_server import running_redis_server

_SMALL = "64 KiB"


@pytest.mark.parametrize(
    ("arguments", "level", "texts"),
    [
        ([], Level.OK, ["64 KiB, 1 MiB, 4 MiB, 9 MiB"]),
        (
            ["--proto-max-bulk-len", "1mb"],
            Level.PROBLEM,
            ["of 4 MiB cannot", "1 MiB can", "proto-max-bulk-len"],
        ),
        pytest.param(
            ["--requirepass", "x"],
            Level.PROBLEM,
            ["does not answer", "NOAUTH"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--rename-command", "HSET", "x"],
            Level.PROBLEM,
            ["of 9 MiB cannot", "HSET"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--rename-command", "UNLINK", "x"],
            Level.PROBLEM,
            [_SMALL, "UNLINK"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--min-replicas-to-write", "1"],
            Level.PROBLEM,
            [_SMALL, "NOREPLICAS"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--maxmemory", "900kb", "--maxmemory-policy", "noeviction"],
            Level.PROBLEM,
            ["OOM"],
            marks=pytest.mark.slow,
        ),
        (["--rename-command", "INFO", "x"], Level.NOTE, ["no object was stored"]),
        (["--maxmemory", "16mb", "--maxmemory-policy", "allkeys-lru"], Level.NOTE, ["evict"]),
    ],
)
def test_the_verdict_is_that_of_workers(arguments, level, texts):
    with running_redis_server(*arguments) as server:
        findings = list(check_store(server.url))
        assert [finding.level for finding in findings if finding.level is not Level.NOTE] == (
            [] if level is Level.NOTE else [level]
        )
        text = " ".join(finding.text for finding in findings)
        assert all(part in text for part in texts), text
        if level is not Level.PROBLEM:
            assert ask(server, "DBSIZE") == 0


def test_a_full_server_keeps_all_it_has():
    bound = ["--maxmemory", "24mb", "--maxmemory-policy", "allkeys-lru"]
    keys = random_keys(10)
    with running_redis_server(*bound) as server:
        with closing(open_store(server.url)) as store:
            store.put(keys, [filled(1, 1_000_000)] * 10)
        (note,) = check_store(server.url)
        assert note.level is Level.NOTE
        assert ask(server, "DBSIZE") == 10
        assert ask(server, "INFO")["evicted_keys"] == 0


def test_a_replica_is_a_problem_though_it_is_read(redis_server):
    ask(redis_server, "REPLICAOF", "127.0.0.1", 1)
    findings = list(check_store(redis_server.url))
    assert findings[0].level is Level.PROBLEM
    assert "READONLY" in findings[0].text
