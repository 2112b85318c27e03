"""The redis store on servers that refuse some of its calls: it does what it can, and says why."""

import logging
import re
from contextlib import closing, contextmanager

import pytest

from baton.doctor import Level
from baton.doctor.connectors import check_store
from kvstore.conformance.objects import blank, filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, StoreUnavailableError
from kvstore.stores.redis import diagnosis
from kvstore.stores.redis.objects import object_name
from tests.support.ports import reserved_port
from tests.support.redis_deployments import acl_rules, ask, make_certificate
from tests.support.redis_server import await_true, running_redis_server

_slow = pytest.mark.slow
_SMALL, _LARGE = 100_000, 5_000_000
_SIZES = [_SMALL, _LARGE, _SMALL]


def objects(byte=1):
    return [filled(byte, size) for size in _SIZES]


def stop_saving(server, folder):
    """Makes a snapshot fail, after which a server refuses writes (MISCONF)."""
    (folder / "dump.rdb").mkdir()  # which no file can replace
    ask(server, "CONFIG", "SET", "save", "900 1")
    ask(server, "BGSAVE")
    await_true(lambda: ask(server, "INFO")["rdb_last_bgsave_status"] == "err", "a failed snapshot")


_NO_WRITES = {
    "MISCONF": (stop_saving, lambda server: ask(server, "CONFIG", "SET", "save", "")),
    "NOREPLICAS": (
        lambda server, _: ask(server, "CONFIG", "SET", "min-replicas-to-write", 1),
        lambda server: ask(server, "CONFIG", "SET", "min-replicas-to-write", 0),
    ),
    "READONLY": (
        lambda server, _: ask(server, "REPLICAOF", "127.0.0.1", reserved_port()),
        lambda server: ask(server, "REPLICAOF", "NO", "ONE"),
    ),
    "NOPERM": (
        lambda server, _: ask(server, "ACL", "SETUSER", "default", "-@write", "-eval"),
        lambda server: ask(server, "ACL", "SETUSER", "default", "+@all"),
    ),
}


@pytest.mark.parametrize(
    "refusal",
    ["MISCONF", "READONLY", *(pytest.param(r, marks=_slow) for r in ("NOREPLICAS", "NOPERM"))],
)
def test_what_a_server_without_writes_holds_is_read(tmp_path, monkeypatch, caplog, refusal):
    caplog.set_level(logging.INFO, "baton.kvstore")
    monkeypatch.setattr(diagnosis, "_RETRY_S", 0.0)
    stop_writes, allow_writes = _NO_WRITES[refusal]
    keys = random_keys(len(_SIZES))
    with (
        running_redis_server("--dir", str(tmp_path)) as server,
        closing(open_store(f"{server.url}?timeout_s=20")) as store,
    ):
        store.put(keys, objects())
        for key in keys:
            ask(server, "PEXPIRE", object_name(key), 60_000)
        stop_writes(server, tmp_path)
        for _ in range(2):
            found = [blank(size) for size in _SIZES]
            assert store.contains_prefix([*keys, *random_keys(1)]) == len(keys)
            assert store.get_into(keys, found) == [GetStatus.HIT] * len(keys)
            assert found == objects()
            assert read(store, random_keys(1)[0], _SMALL) is GetStatus.MISSING
        with pytest.raises(StoreUnavailableError, match=refusal):
            store.put(random_keys(1), [filled(2, _SMALL)])
        (line,) = [record.message for record in caplog.records]
        assert re.search(f"without being kept for longer: 127.0.0.1:.*{refusal}", line)

        allow_writes(server)
        store.get_into(keys, found)
        lives_ms = [ask(server, "PTTL", object_name(key)) for key in keys]
        assert min(lives_ms) > 3_000_000, "the objects are kept again"
        assert "no longer" in caplog.records[-1].message


def test_a_server_without_scripts_is_used_without_them(caplog):
    keys = random_keys(len(_SIZES))
    with (
        running_redis_server("--rename-command", "EVAL", "hidden") as server,
        closing(open_store(f"{server.url}?timeout_s=20")) as store,
    ):
        store.put(keys, objects())
        found = [blank(size) for size in _SIZES]
        for _ in range(3):
            assert store.contains_prefix(keys) == len(keys)
            assert store.get_into(keys, found) == [GetStatus.HIT] * len(keys)
        assert found == objects()
        (line,) = [record.message for record in caplog.records]
        assert "unknown command 'EVAL'" in line
        assert "redis.call" not in line, "the log has the script"
        works, note = check_store(server.url)
        assert (works.level, note.level) == (Level.OK, Level.NOTE)
        assert "EVAL" in note.text


# Users.


@contextmanager
def running_with_user(*rules):
    """Runs a server whose only user has these rules; yields the server and the user's URL."""
    with running_redis_server() as server:
        ask(server, "ACL", "SETUSER", "baton", "on", ">secret", *rules)
        yield server, server.url.replace("//", "//baton:secret@")


@pytest.mark.parametrize("database", [pytest.param(0, marks=_slow), 1])
def test_the_commands_that_the_page_lists_are_those_that_workers_need(database, caplog):
    rules = acl_rules("Workers")
    with running_with_user(*rules) as (_, first):
        url = first.removesuffix("0") + str(database)
        (finding,) = check_store(url)
        assert finding.level is Level.OK, finding.text
        assert not caplog.records
        keys = random_keys(3)
        with closing(open_store(f"{url}?timeout_s=20")) as store:
            store.put(keys, objects())
            assert store.contains_prefix(keys) == 3
            assert store.get_into(keys, [blank(size) for size in _SIZES]) == [GetStatus.HIT] * 3
            assert store.delete(keys) == 3


@pytest.mark.slow
def test_each_command_that_the_page_lists_is_needed():
    """Without one, doctor says which, or what is lost."""
    rules = acl_rules("Workers")
    commands = {rule for rule in rules if rule.startswith("+")}
    of_others = {"+select", "+cluster|slots", "+asking"}  # of other databases, and of clusters
    with running_with_user(*rules) as (server, url):
        for command in commands - of_others - {"+exists"}:  # a script does without it
            ask(server, "ACL", "SETUSER", "baton", command.replace("+", "-"))
            findings = list(check_store(url))
            name = command.removeprefix("+").partition("|")[0]
            assert findings[0].level is not Level.OK or len(findings) > 1, command
            text = " ".join(finding.text for finding in findings)
            assert re.search(name, text, re.IGNORECASE), findings
            ask(server, "ACL", "SETUSER", "baton", command)


def test_a_user_that_may_only_read_reads():
    keys = random_keys(len(_SIZES))
    with running_with_user(*acl_rules("Reading alone")) as (server, url):
        with closing(open_store(f"{server.url}?timeout_s=20")) as writer:
            writer.put(keys, objects())
        with closing(open_store(f"{url}?timeout_s=20")) as store:
            found = [blank(size) for size in _SIZES]
            assert store.contains_prefix(keys) == len(keys)
            assert store.get_into(keys, found) == [GetStatus.HIT] * len(keys)
            assert found == objects()


# Passwords that change.


def test_a_rotated_password_is_read_from_its_file_again(tmp_path):
    file = tmp_path / "password"
    file.write_text("first\n")
    with (
        running_redis_server("--requirepass", "first") as server,
        closing(open_store(f"{server.url}?password_file={file}")) as store,
    ):
        (key,) = random_keys(1)
        store.put([key], [filled(1, 100)])
        with_password(server, "first", "CONFIG", "SET", "requirepass", "second")
        with_password(server, "second", "CLIENT", "KILL", "TYPE", "normal")
        with pytest.raises(StoreUnavailableError, match="password is wrong") as failure:
            store.contains_prefix([key])
        assert "first" not in str(failure.value)
        file.write_text("second\n")
        assert store.contains_prefix([key]) == 1


def test_a_sentinels_rotated_password_is_read_again(tmp_path):
    file = tmp_path / "password"
    file.write_text("first")
    with running_redis_server() as master:
        config = tmp_path / "sentinel.conf"
        config.write_text(f"sentinel monitor kv 127.0.0.1 {master.port} 1\nrequirepass first\n")
        with running_redis_server("--sentinel", config=str(config)) as sentinel:
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/kv?sentinel_password_file={file}"
            with closing(open_store(url)) as store:
                await_true(lambda: is_answering(store), "a master is known")
                with_password(
                    sentinel, "first", "ACL", "SETUSER", "default", "resetpass", ">second"
                )
                with_password(sentinel, "second", "CLIENT", "KILL", "TYPE", "normal")
                ask(master, "CLIENT", "KILL", "TYPE", "normal")
                assert not is_answering(store)
                file.write_text("second")
                assert is_answering(store)


def test_the_commands_that_the_page_lists_suffice_for_sentinels(tmp_path):
    with running_redis_server() as master:
        config = tmp_path / "sentinel.conf"
        config.write_text(f"sentinel monitor kv 127.0.0.1 {master.port} 1\n")
        with running_redis_server("--sentinel", config=str(config)) as sentinel:
            ask(sentinel, "ACL", "SETUSER", "baton", "on", ">secret", *acl_rules("Sentinels"))
            ask(sentinel, "ACL", "SETUSER", "default", "off")
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/kv"
            login = "?sentinel_user=baton&sentinel_password=secret"
            with closing(open_store(url + login)) as store:
                await_true(lambda: is_answering(store), "a master is known")
            with closing(open_store(url)) as store:
                assert not is_answering(store)


def with_password(server, password, *command):
    from redis import Redis

    with Redis(port=server.port, password=password, socket_timeout=10) as client:
        return client.execute_command(*command)


def is_answering(store):
    try:
        return store.contains_prefix(random_keys(1)) == 0
    except StoreUnavailableError:
        return False


# What errors say.


@pytest.mark.parametrize(
    ("arguments", "url", "texts"),
    [
        pytest.param(
            ["--requirepass", "x"], "{url}", ["NOAUTH", "the URL needs a password"], marks=_slow
        ),
        (["--requirepass", "x"], "{login}", ["WRONGPASS", "the user or the password is wrong"]),
        (["--proto-max-bulk-len", "1mb"], "{url}", ["raise the server's proto-max-bulk-len"]),
        (["--maxmemory", "1mb", "--maxmemory-policy", "noeviction"], "{url}", ["does not evict"]),
        pytest.param(
            ["--rename-command", "SET", "hidden"], "{url}", ["unknown command 'SET'"], marks=_slow
        ),
        ([], "{tls}", ["does not speak TLS: write redis in place of rediss"]),
        pytest.param(
            [],
            "redis+cluster://127.0.0.1:{port}",
            ["cluster support disabled", "write redis://"],
            marks=_slow,
        ),
        ([], "redis+sentinel://127.0.0.1:{port}/kv", ["No master found for 'kv'", "sentinel"]),
    ],
)
def test_an_error_names_the_server_and_what_to_do(arguments, url, texts):
    with running_redis_server(*arguments) as server:
        forms = {
            "url": server.url,
            "port": server.port,
            "login": server.url.replace("//", "//user:hunter2@"),
            "tls": server.url.replace("redis", "rediss"),
        }
        with (
            closing(open_store(url.format(**forms) + "?timeout_s=2")) as store,
            pytest.raises(StoreUnavailableError) as failure,
        ):
            store.put(random_keys(1), [filled(1, 3_000_000)])
        text = str(failure.value)
        assert f"127.0.0.1:{server.port}" in text
        assert all(part in text for part in texts), text
        assert "hunter2" not in text


def test_a_plain_call_to_a_tls_port_says_so(tmp_path):
    certificate, port = make_certificate(tmp_path), reserved_port()
    for clients in (False, True):
        arguments = certificate.server_arguments(port, clients=clients)
        with (
            running_redis_server(*arguments),
            closing(open_store(f"redis://127.0.0.1:{port}")) as store,
            pytest.raises(StoreUnavailableError, match=f"{port}.*write rediss in place of redis"),
        ):
            store.contains_prefix(random_keys(1))
