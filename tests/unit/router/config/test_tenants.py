"""Who may call the router: keys, the file of tenants, and limits."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.errors import (
    BatonError,
    ConfigurationError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from baton.common.security.tokens import hash_of_key, new_key
from router.config.tenants import TenantPolicy, TenantsConfig
from router.fleet.fair_shares import Share
from router.tenants.tenant import OPEN_TENANT, Tenant
from router.tenants.tenants import Tenants, credentials_of, read_tenants
from router.tenants.token_bucket import TokenBucket
from rpc.logs import CallInfo, serving
from tests.support.loop_watch import watched_loops
from tests.support.tenants import KEY, OTHER_KEY, Clock, entry_of, write_tenants


def limited(**limits: object) -> tuple[Tenant, Clock]:
    clock = Clock()
    return Tenant("a", TenantPolicy(name="a", **limits), clock), clock


# Buckets.


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 200), st.integers(1, 20_000)), max_size=30),
)
def test_what_a_bucket_gives_is_bounded_by_its_rate(rate: int, uses: Sequence[tuple[float, int]]):
    bucket, now, taken = TokenBucket(rate, 0.0), 0.0, 0
    for pause_s, amount in uses:
        now += pause_s
        if bucket.wait_s(amount, now) == 0:
            bucket.take(amount, now)
            taken += amount
            # The last use alone may have exceeded what had flowed in.
            assert taken - amount <= rate + now * rate / 60 + 1e-6 * rate + 1e-6


@given(st.integers(1, 10_000), st.integers(1, 50_000), st.integers(1, 20_000))
def test_the_stated_wait_is_the_shortest_one(rate: int, used: int, amount: int):
    bucket = TokenBucket(rate, 0.0)
    bucket.take(used, 0.0)
    wait_s = bucket.wait_s(amount, 0.0)
    if wait_s > 1e-3:
        assert bucket.wait_s(amount, wait_s * 0.99) > 0
    assert bucket.wait_s(amount, wait_s * (1 + 1e-9) + 1e-9) == 0


def test_a_clock_that_goes_back_gives_nothing():
    bucket = TokenBucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.wait_s(1, 50.0) == pytest.approx(51)
    assert bucket.wait_s(1, 100.5) == pytest.approx(0.5)


# Limits.


def test_requests_per_minute_have_a_true_time_of_retry():
    tenant, clock = limited(requests_per_minute=2)
    for _ in range(2):
        with tenant.running():
            pass
    with pytest.raises(ResourceExhaustedError, match="2 requests per minute") as refused:
        tenant.running().__enter__()
    assert refused.value.retry_after_s == pytest.approx(30)
    clock.now += 30
    with tenant.running():
        pass


@pytest.mark.parametrize("num_prompts", [4, 6, 10])
def test_a_call_of_several_prompts_begins_after_the_stated_wait(num_prompts):
    tenant, clock = limited(requests_per_minute=6)

    def call():
        with tenant.running(), tenant.running_prompts(num_prompts):
            pass

    with tenant.running(3), pytest.raises(ResourceExhaustedError) as refused:
        call()
    lacking = min(num_prompts, 6) - 3  # a call with more than a minute's needs a full minute
    assert refused.value.retry_after_s == pytest.approx(10 * lacking)
    clock.now += refused.value.retry_after_s
    call()


def test_the_prompts_of_a_call_that_is_not_counted_take_and_give_nothing():
    tenant, _ = limited(requests_per_minute=2, max_concurrent_requests=2)
    with tenant.running(2):
        with serving(CallInfo(caller=tenant, is_counted=False)), tenant.running_prompts(9):
            pass
        with pytest.raises(ResourceExhaustedError, match="at most 2"):
            tenant.running().__enter__()
    with pytest.raises(ResourceExhaustedError, match="2 requests per minute") as refused:
        tenant.running().__enter__()
    assert refused.value.retry_after_s == pytest.approx(30)


def test_tokens_in_excess_delay_the_next_request():
    tenant, clock = limited(tokens_per_minute=60)
    with tenant.running():
        tenant.use_tokens(150)
    with pytest.raises(ResourceExhaustedError, match="60 tokens per minute") as refused:
        tenant.running().__enter__()
    assert refused.value.retry_after_s == pytest.approx(91)
    clock.now += 91
    with tenant.running():
        tenant.check_tokens()
        tenant.use_tokens(500)
        with pytest.raises(ResourceExhaustedError):
            tenant.check_tokens()


def test_running_requests_are_limited_until_they_end():
    tenant, _ = limited(max_concurrent_requests=2, requests_per_minute=2)
    first = tenant.running()
    first.__enter__()
    with tenant.running():
        for _ in range(5):
            with pytest.raises(ResourceExhaustedError, match="at most 2") as refused:
                tenant.running().__enter__()
            assert refused.value.retry_after_s is None
    first.__exit__(None, None, None)
    with pytest.raises(ResourceExhaustedError, match="per minute"):
        tenant.running().__enter__()  # a refused one uses up no rate, the two others did


def test_refused_calls_are_counted_by_reason():
    reasons: list[str] = []
    policy = TenantPolicy(name="a", requests_per_minute=1, models=("m",))
    tenant = Tenant("a", policy, Clock(), reasons.append)
    with tenant.running():
        pass
    with pytest.raises(ResourceExhaustedError):
        tenant.running().__enter__()
    with pytest.raises(PermissionDeniedError):
        tenant.check_model(("other",))
    tenant.check_model(("alias", "m"))
    assert reasons == ["request_rate", "permission"]


def test_a_priority_is_no_more_urgent_than_its_limit():
    tenant, _ = limited(max_priority=3)
    assert [tenant.priority(one) for one in (-5, 3, 9)] == [3, 3, 9]
    assert OPEN_TENANT.priority(-5) == -5


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), min_size=2, max_size=8))
def test_salts_of_two_tenants_never_meet(pairs: Sequence[tuple[str, str]]):
    salts = {}
    for name, client_salt in pairs:
        tenant = Tenant(f"n{name}", TenantPolicy(name="a"))
        salts.setdefault(tenant.cache_salt(client_salt), set()).add((name, client_salt))
        assert tenant.cache_salt(tenant.cache_salt(client_salt)) != tenant.cache_salt(client_salt)
    assert all(len(users) == 1 for users in salts.values())


def test_the_open_tenant_keeps_the_salts_of_clients():
    assert OPEN_TENANT.cache_salt("x") == "x"


# Credentials.


def test_both_headers_carry_credentials():
    assert credentials_of("Bearer a", "b") == ["a", "b"]
    assert credentials_of("bearer  a ", None) == ["a"]
    assert credentials_of("Basic a", " ") == []


def test_a_router_without_clients_is_open():
    assert Tenants(TenantsConfig()).find(["anything"]) is OPEN_TENANT
    assert Tenants(TenantsConfig()).find([]) is OPEN_TENANT


@pytest.mark.parametrize(
    "key",
    ["", "x", KEY[:-1], KEY + "x", hash_of_key(KEY), "é" * 9],
    ids=["none", "short", "cut", "longer", "hash", "not ASCII"],  # not the keys, which are random
)
def test_a_wrong_key_is_refused_with_one_message(key: str):
    reasons: list[str] = []
    tenants = Tenants(TenantsConfig(api_key=(KEY, OTHER_KEY)), count_refusal=reasons.append)
    with pytest.raises(UnauthenticatedError) as refused:
        tenants.find([key] if key else [])
    assert refused.value.message == "the call lacks a valid credential"
    assert reasons == ["credentials"]
    assert tenants.find([key, OTHER_KEY]) is tenants.find([KEY])


def test_no_config_shows_a_key():
    config = TenantsConfig(api_key=(KEY,))
    assert KEY not in repr(config)
    assert TenantsConfig(api_key=config.api_key) == config
    for bad in ("short", "has spaces in it", "not-ascii-é"):
        with pytest.raises(ConfigurationError, match="--api-key must have keys") as refused:
            TenantsConfig(api_key=(bad,))
        assert bad not in refused.value.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"jwks_file": "x", "jwt_issuer": "i"}, "--jwt-audience is missing"),
        ({"jwks_file": "x", "jwt_audience": "a"}, "--jwt-issuer is missing"),
        ({"jwt_audience": "a"}, "--jwt-audience is set; it needs --jwks-file"),
        ({"jwt_tenant_claim": ""}, "--jwt-tenant-claim is empty"),
    ],
)
def test_flags_that_need_others_are_refused(fields: dict[str, str], message: str):
    with pytest.raises(ConfigurationError, match=message):
        TenantsConfig(**fields)


# The file of tenants.


def test_a_file_says_who_calls_and_what_they_may(tmp_path: Path):
    path = write_tenants(
        tmp_path,
        entry_of("a", KEY, max_priority=-1, requests_per_minute="1k", models="[m, n]"),
        entry_of("b", OTHER_KEY),
    )
    tenants = Tenants(TenantsConfig(tenants=path))
    tenant = tenants.find([KEY])
    assert tenant.name == "a"
    assert tenant.policy.requests_per_minute == 1000
    assert tenant.policy.models == ("m", "n")
    assert tenant.priority(-9) == -1
    assert tenants.find([OTHER_KEY]).name == "b"
    assert tenants.find([KEY]) is tenant


def test_a_tenant_has_a_weight(tmp_path: Path):
    path = write_tenants(tmp_path, entry_of("a", KEY, weight=3), entry_of("b", OTHER_KEY))
    tenants = Tenants(TenantsConfig(tenants=path))
    assert tenants.find([KEY]).share == Share("a", 3)
    assert tenants.find([OTHER_KEY]).share == Share("b", 1)


@pytest.mark.parametrize("weight", [0, -1, 1001])
def test_a_bad_weight_is_refused(tmp_path: Path, weight: int):
    path = write_tenants(tmp_path, entry_of("a", KEY, weight=weight))
    with pytest.raises(ConfigurationError, match=f"entry 0: weight is {weight}; it must be in"):
        Tenants(TenantsConfig(tenants=path))


def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    path = write_tenants(tmp_path, entry_of("a", KEY, requests_per_minute=2))
    tenants = Tenants(TenantsConfig(tenants=path), Clock())
    tenant = tenants.find([KEY])
    with tenant.running():
        pass
    write_tenants(tmp_path, "{name: a, keys: [oops]}")
    tenants.read_changes()
    assert tenants.find([KEY]).policy.requests_per_minute == 2
    assert "the last good tenants stay in use: --tenants" in caplog.text
    assert "entry 0: keys must have hashes" in caplog.text
    write_tenants(tmp_path, entry_of("a", OTHER_KEY, requests_per_minute=1))
    tenants.read_changes()
    with pytest.raises(UnauthenticatedError):
        tenants.find([KEY])
    assert tenants.find([OTHER_KEY]) is tenant
    with tenant.running():  # one request of the first limit was left
        pass
    with pytest.raises(ResourceExhaustedError, match="1 requests per minute"):
        tenant.running().__enter__()
    Path(path).unlink()
    tenants.read_changes()
    assert tenants.find([OTHER_KEY]) is tenant


async def test_a_large_changed_file_does_not_block_the_event_loop(tmp_path: Path):
    path = write_tenants(tmp_path, entry_of("a", KEY))
    tenants = Tenants(TenantsConfig(tenants=path), Clock())
    others = [entry_of(f"t{i}", f"sk-baton-{i:040}", requests_per_minute=5) for i in range(1000)]
    with watched_loops() as watch:
        following = asyncio.create_task(tenants.follow_changes())
        await asyncio.sleep(0)
        write_tenants(tmp_path, entry_of("b", KEY), *others)
        for _ in range(2000):
            if tenants.find([KEY]).name == "b":
                break
            await asyncio.sleep(0.01)
        following.cancel()
    assert tenants.find([KEY]).name == "b"
    watch.assert_never_blocked()


async def test_without_a_file_nothing_is_followed():
    async with asyncio.timeout(10):
        await Tenants(TenantsConfig(api_key=(KEY,)), Clock()).follow_changes()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["{name: a, keys: [sk-secret-key]}"], "entry 0: keys must have hashes"),
        (["{keys: []}"], "entry 0: --name is missing"),
        (['{name: "a\\nb"}'], "name must have 1 to 256 printable characters"),
        (["{name: a, requests-per-minute: 0}"], "requests-per-minute is 0; it must be >= 1"),
        (["{name: a, max-priority: 3000000000}"], "max-priority is 3000000000"),
        (["{name: a, requests: 3}"], "unknown flag requests"),
        (["{name: a}", "{name: a}"], "two entries have the same name"),
        ([entry_of("a", KEY), entry_of("b", KEY)], "'a' and 'b' have the same key"),
        ([entry_of("'*'", KEY)], "entry 0: the entry \\* is no tenant"),
        ([f"{{name: {'x' * 300}}}"], "name must have 1 to 256 printable characters"),
        (["[1]"], "must be a mapping"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, entries: Sequence[str], message: str):
    config = TenantsConfig(tenants=write_tenants(tmp_path, *entries))
    with pytest.raises(ConfigurationError, match=message) as refused:
        Tenants(config)
    assert "--tenants" in refused.value.message
    assert "sk-secret" not in refused.value.message
    with pytest.raises(ConfigurationError, match="--tenants cannot read"):
        Tenants(TenantsConfig(tenants=str(tmp_path / "none.yaml")))


def test_the_entries_of_the_page_are_a_valid_file(tmp_path: Path):
    page = Path(__file__).parents[4] / "docs" / "tenants.md"
    path = tmp_path / "tenants.yaml"
    path.write_text(page.read_text().split("```yaml\n")[1].split("```")[0])
    file = read_tenants(str(path))
    assert file.policies["acme"].tokens_per_minute == 2**20
    assert file.policy_of("stranger") is file.policies["*"]


def test_keys_of_the_flag_have_the_limits_of_their_entry(tmp_path: Path):
    path = write_tenants(tmp_path, entry_of("default", OTHER_KEY, max_priority=7))
    tenants = Tenants(TenantsConfig(tenants=path, api_key=(KEY,)))
    assert tenants.find([KEY]) is tenants.find([OTHER_KEY])
    assert tenants.find([KEY]).priority(0) == 7
    write_tenants(tmp_path, entry_of("other", OTHER_KEY))
    tenants.read_changes()
    assert tenants.find([KEY]).priority(0) == 0


def test_tenants_without_a_use_are_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("router.tenants.tenants._MAX_TENANTS", 2)
    keys = [new_key() for _ in range(6)]
    entries = [entry_of(f"t{i}", key, requests_per_minute=5) for i, key in enumerate(keys)]
    tenants = Tenants(TenantsConfig(tenants=write_tenants(tmp_path, *entries)), Clock())
    first = tenants.find([keys[0]])
    with first.running():
        pass
    for key in keys:
        tenants.find([key])
    assert tenants.find([keys[0]]) is first  # it has used a part of its minute
    assert len(tenants._tenants) <= 4


def test_every_error_of_credentials_is_a_baton_error():
    assert issubclass(UnauthenticatedError, BatonError)
