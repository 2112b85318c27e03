"""Baton's own stores pass the public conformance suite, run as a third party runs it,
and stores that break the contract do not."""

import uuid
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import rmtree

import pytest

from tests.support.conformance_suite import (
    SUITE_DEADLINE_S,
    check_suite,
    install_stores,
    run_failing_suites,
    run_suite,
)
from tests.support.ports import reserved_port
from tests.support.redis_deployments import make_certificate, running_cluster, running_sentinels
from tests.support.redis_server import running_redis_server

_REPOSITORY = Path(__file__).parents[2]
_FAILING_TESTS = {
    "overwriting": "test_putting_an_existing_key_keeps_the_old_object",
    "torn": "test_threads_never_see_a_torn_or_changed_object",
    "counting": "test_stops_at_the_first_hole",
    "immortal": "test_what_expired_is_as_if_it_had_never_been",
    "untouched": "test_a_hit_touches",
    "peeking": "test_a_look_up_touches_all_that_it_counts",
    "reviving": "test_what_expired_is_as_if_it_had_never_been",
    "unbounded": "test_objects_keep_to_the_bound",
    "sweeping": "test_opening_evicts_nothing",
    "evicting": "test_a_put_evicts_nothing_that_is_leased",
    "forgetful": "test_a_touch_renews_the_lease",
    "hasty": "test_the_timeout_is_that_of_the_url",
    "careless": "test_an_unknown_option_is_an_error_that_names_it",
}


@contextmanager
def _memory(folder):
    yield "memory://conformance"


@contextmanager
def _shm(folder):
    name = f"conformance-{uuid.uuid4().hex}"
    yield f"shm://{name}"
    rmtree(f"/dev/shm/baton-{name}", ignore_errors=True)


@contextmanager
def _file(folder):
    yield f"file://{folder}/store"


@contextmanager
def _redis(folder):
    with running_redis_server() as server:
        yield server.url


@contextmanager
def _redis_with_tls_and_password(folder):
    certificate, port = make_certificate(folder), reserved_port()
    with running_redis_server(*certificate.server_arguments(port), "--requirepass", "p@ss"):
        yield f"rediss://:p%40ss@127.0.0.1:{port}/3?ca_file={certificate.path}"


@contextmanager
def _redis_cluster(folder):
    with running_cluster(folder) as cluster:
        yield cluster.url


@contextmanager
def _redis_sentinels(folder):
    # A busy machine must not look like a master that is down, whose last objects would be lost.
    with running_sentinels(folder, down_after_ms=60_000) as deployment:
        yield deployment.url


STORES = {
    "memory": _memory,
    "shm": _shm,
    "file": _file,
    "redis": _redis,
    "redis with TLS and a password": _redis_with_tls_and_password,
    "redis cluster": _redis_cluster,
    "redis sentinels": _redis_sentinels,
}


@pytest.fixture(scope="module")
def started_suites(request, tmp_path_factory, suites):
    """The suites on the stores whose tests were selected."""
    cases = [item for item in request.session.items if item.module is request.module]
    selected = [
        item.callspec.params["store"] for item in cases if "started_suites" in item.fixturenames
    ]
    with ExitStack() as stack:
        started = {}
        for index, store in enumerate(selected):
            folder = tmp_path_factory.mktemp(f"store-{index}")
            url = stack.enter_context(STORES[store](folder))
            # As a connector, a store does the same on every deployment of Redis.
            arguments = ("-k", "not connector") if store.startswith("redis ") else ()
            started[store] = suites.start(url, folder / "run", *arguments)
        yield started
        suites.close()  # before the stores go


@pytest.mark.timeout(4 * SUITE_DEADLINE_S)
@pytest.mark.parametrize(
    "store",
    [pytest.param(name, marks=() if name == "memory" else pytest.mark.slow) for name in STORES],
)
def test_our_stores_conform(started_suites, store):
    check_suite(started_suites[store])


@pytest.fixture(scope="module")
def third_party_packages(tmp_path_factory):
    """A folder with an installed package that names its stores as entry points."""
    folder = tmp_path_factory.mktemp("site-packages")
    source = _REPOSITORY / "tests" / "support" / "nonconforming_stores.py"
    schemes = ["good", *_FAILING_TESTS]
    class_names = {scheme: f"{scheme.capitalize()}Store" for scheme in schemes}
    install_stores(folder, source.read_text(), class_names)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(2 * SUITE_DEADLINE_S)
def test_the_guides_store_conforms(tmp_path, suites):
    """The store that docs/connector-contract.md shows must work."""
    guide = (_REPOSITORY / "docs" / "connector-contract.md").read_text()
    source = guide.split("```python\n")[1].split("```")[0]
    install_stores(tmp_path, source, {"sqlite": "SqliteStore"})
    url = f"sqlite://{tmp_path}/kv.sqlite"
    check_suite(suites.start(url, tmp_path / "run", python_path=tmp_path))


@pytest.mark.slow
def test_a_third_partys_store_is_found(tmp_path, suites, third_party_packages):
    folder, packages = tmp_path / "run", third_party_packages
    check_suite(suites.start("good://x", folder, "-k", "leading_keys", python_path=packages))


@pytest.mark.slow
@pytest.mark.timeout(3 * SUITE_DEADLINE_S)
def test_stores_that_break_the_contract_fail(tmp_path, third_party_packages):
    run_failing_suites(_FAILING_TESTS, tmp_path, third_party_packages)


@pytest.mark.slow
def test_the_suite_requires_a_url(tmp_path):
    run = run_suite(tmp_path, "-k", "leading_keys", "-x")
    assert run.returncode != 0
    assert "--kv-connector URL" in run.stdout
