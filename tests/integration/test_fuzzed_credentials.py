"""Credentials with any bytes: each is refused with one message, and none is shown anywhere."""

import base64
import json
import logging
import random
import string
from pathlib import Path

import pytest

from baton.common.errors import UnauthenticatedError
from router.config.http import HttpConfig
from router.config.tenants import TenantsConfig
from router.http.app import build_app
from router.tenants.tenants import Tenants, credentials_of
from tests.support.asgi_calls import call_app
from tests.support.odd_requests import OddRequest
from tests.support.tenants import (
    AUDIENCE,
    ISSUER,
    JWT_KEYS,
    KEY,
    jwk_of,
    token_of,
    write_jwks,
)

NUM_TOKENS = 30_000
NUM_HEADERS = 10_000
PLANTED = "planted-secret-4711"
_ALPHABET = string.printable + "é😀\ud800\x00"
_SCHEMES = ("Bearer ", "bearer ", "BEARER\t", "Basic ", "Token ", "", " ", "Bearer", "Bearer  ")


def odd_credential(rng: random.Random, good: list[str]) -> str:
    """A credential that is nearly right, or any text; it may contain the planted secret."""
    kind = rng.randrange(4)
    if kind == 0:
        text = "".join(rng.choices(_ALPHABET, k=rng.randrange(60)))
    elif kind == 1:
        text = ".".join(_part(rng) for _ in range(rng.choice((2, 3, 3, 3, 5))))
    else:
        text = rng.choice(good)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(text) - 1)
            text = text[:place] + rng.choice(_ALPHABET) + text[place + rng.randrange(3) :]
    return text + (PLANTED if rng.random() < 0.1 else "")


def _part(rng: random.Random) -> str:
    """A part of a token: JSON with odd values, encoded."""
    names = ("alg", "kid", "crit", "b64", "exp", "aud", "iss", "sub", "nbf", "iat", "typ", "jwk")
    values = ("ES256", "none", "HS256", "RS256", None, True, 0, -1, 1e400, 10**400, [], {}, [[]])
    data = {rng.choice(names): rng.choice(values) for _ in range(rng.randrange(6))}
    text = json.dumps(data) if rng.random() < 0.8 else "[" * rng.randrange(3000)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def tenants_of(folder: Path) -> Tenants:
    path = write_jwks(folder, *(jwk_of(name) for name in JWT_KEYS))
    config = TenantsConfig(
        api_key=(KEY, PLANTED), jwks_file=path, jwt_issuer=ISSUER, jwt_audience=AUDIENCE
    )
    return Tenants(config)


def fuzz_tokens(tenants: Tenants, seed: int, count: int) -> int:
    """Shows odd credentials; returns how many were let in."""
    good = [KEY, *(token_of(name) for name in JWT_KEYS)]
    num_let_in, messages = 0, set()
    for number in range(count):
        credential = odd_credential(random.Random(f"{seed}-{number}"), good)
        try:
            tenants.find([credential])
        except UnauthenticatedError as error:
            messages.add(error.message)
        else:
            # A change may have changed nothing, or bits of a signature that do not count.
            num_let_in += 1
    assert messages == {"the call lacks a valid credential"}
    return num_let_in


async def fuzz_headers(tenants: Tenants, seed: int, count: int) -> None:
    """Sends odd headers to the application."""
    app = build_app((), HttpConfig(), tenants)  # type: ignore[arg-type]  # no model is asked for
    good = [KEY, *(token_of(name) for name in JWT_KEYS)]
    statuses = set()
    for number in range(count):
        rng = random.Random(f"{seed}-{number}")
        credential = KEY if number % 10 == 0 else odd_credential(rng, good)
        value = rng.choice(_SCHEMES) + credential
        name = rng.choice((b"authorization", b"x-api-key"))
        headers = [(name, value.encode(errors="surrogatepass"))] * rng.choice((1, 1, 2))
        answer = await call_app(app, OddRequest("GET", "/version", headers=tuple(headers)))
        statuses.add(answer.status)
        assert PLANTED.encode() not in answer.body, number
    assert statuses == {200, 401}


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    assert PLANTED not in caplog.text
    assert KEY not in caplog.text
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


async def test_some_odd_credentials(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    tenants = tenants_of(tmp_path)
    assert fuzz_tokens(tenants, 1, 1000) < 100
    await fuzz_headers(tenants, 1, 300)
    check_log(caplog)
    assert credentials_of(f"Bearer {PLANTED}", None) == [PLANTED]
    assert tenants.find([PLANTED]).name == "default"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_thousands_of_odd_credentials(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    tenants = tenants_of(tmp_path)
    assert fuzz_tokens(tenants, 2, NUM_TOKENS) < NUM_TOKENS / 20
    await fuzz_headers(tenants, 2, NUM_HEADERS)
    check_log(caplog)
