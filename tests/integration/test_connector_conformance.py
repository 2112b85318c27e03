"""Baton's own connectors pass the public conformance suite, run as a third party runs it,
and connectors that break the contract do not."""

from pathlib import Path

import pytest

from tests.support.conformance_suite import (
    SUITE_DEADLINE_S,
    check_suite,
    install_stores,
    run_failing_suites,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(4 * SUITE_DEADLINE_S),
]

_REPOSITORY = Path(__file__).parents[2]
_CONNECTOR_GROUP = "baton.kv_connectors"
_FAILING_TESTS = {
    "twofold": "test_one_engine_saves_and_loads",
    "leaky": "test_what_lies_behind_a_tail_stays_where_it_is",
    "boastful": "test_a_prefix_is_good_where_the_rest_is_missing",
    "gappy": "test_only_an_unbroken_prefix_counts",
    "silent": "test_the_engine_is_woken_for_each_result",
    "late": "test_a_cancelled_load_ends_once_and_writes_nothing_afterwards",
    "eager": "test_what_is_lent_is_given_back_when_its_lease_is_ended",
    "hasty": "test_a_lease_that_was_not_offered_does_not_run_out",
    "restless": "test_a_lease_that_has_ended_does_not_begin_again",
    "generous": "test_nothing_is_read_after_the_end_of_a_lease",
    "shapeless": "test_blocks_of_another_shape_are_refused",
    "swapped": "test_blocks_arrive_as_they_were_and_nothing_else_changes",
    "forgetful": "test_a_lease_that_is_kept_lasts_until_it_is_dropped",
    "lasting": "test_a_closed_publisher_costs_a_bounded_time",
    "careless": "test_an_unknown_option_is_an_error_that_names_it",
    "modest": "test_what_is_lent_is_declared",
}


URLS = (
    "grpc://",
    "nixl://",
    "faulty+memory://faultless?faults=",
    "multi://grpc://,memory://several",
    "multi://faulty+grpc://?faults=fail_load:1,file://{}",
)


@pytest.fixture(scope="module")
def started_suites(suites, tmp_path_factory):
    """The suites on our connectors; test_kv_conformance.py tests stores as connectors, too."""
    started = {}
    for index, url in enumerate(URLS):
        folder = tmp_path_factory.mktemp(f"connector-{index}")
        started[url] = suites.start(url.format(folder), folder / "run", "-k", "connector")
    return started


@pytest.mark.parametrize("url", URLS)
def test_our_connectors_conform(started_suites, url):
    check_suite(started_suites[url])


@pytest.fixture(scope="module")
def third_party_packages(tmp_path_factory):
    """A folder with an installed package that names its connectors as entry points."""
    folder = tmp_path_factory.mktemp("site-packages")
    source = _REPOSITORY / "tests" / "support" / "nonconforming_connectors.py"
    names = {each: f"{each.capitalize()}Connector" for each in ["good", *_FAILING_TESTS]}
    install_stores(folder, source.read_text(), names, _CONNECTOR_GROUP)
    return folder


def test_a_third_partys_connector_conforms(tmp_path, suites, third_party_packages):
    output = check_suite(
        suites.start("good://", tmp_path / "run", python_path=third_party_packages)
    )
    assert "test_objects" not in output, "a connector is not a store"


def test_connectors_that_break_the_contract_fail(tmp_path, third_party_packages):
    run_failing_suites(_FAILING_TESTS, tmp_path, third_party_packages)


def test_the_guides_connector_conforms(tmp_path, suites):
    """The connector that docs/connector-contract.md shows must work."""
    guide = (_REPOSITORY / "docs" / "connector-contract.md").read_text()
    source = guide.split("```python\n")[2].split("```")[0]
    install_stores(tmp_path, source, {"mailbox": "MailboxConnector"}, _CONNECTOR_GROUP)
    check_suite(suites.start(f"mailbox://{tmp_path}/box", tmp_path / "run", python_path=tmp_path))
