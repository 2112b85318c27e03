"""Tokens of clients (JWT): only those with a good signature, issuer, audience and time count."""

import base64
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from baton.common.errors import ConfigurationError, PermissionDeniedError, UnauthenticatedError
from router.config.tenants import TenantsConfig
from router.tenants.tenants import Tenants
from tests.support.tenants import (
    AUDIENCE,
    ISSUER,
    JWT_KEYS,
    entry_of,
    jwk_of,
    token_of,
    write_jwks,
    write_tenants,
)


def tenants_of(folder: Path, **config: Any) -> Tenants:
    if not (folder / "jwks.json").exists():
        write_jwks(folder, *(jwk_of(name) for name in JWT_KEYS))
    path = str(folder / "jwks.json")
    given = {"jwks_file": path, "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, **config}
    return Tenants(TenantsConfig(**given))


def name_of(tenants: Tenants, token: str) -> str | None:
    try:
        return tenants.find([token]).name
    except UnauthenticatedError:
        return None


@pytest.mark.parametrize("algorithm", JWT_KEYS)
def test_a_good_token_names_its_tenant(tmp_path: Path, algorithm: str):
    assert name_of(tenants_of(tmp_path), token_of(algorithm)) == "acme"


def test_another_claim_can_name_the_tenant(tmp_path: Path):
    tenants = tenants_of(tmp_path, jwt_tenant_claim="org")
    assert name_of(tenants, token_of(org="umbrella")) == "umbrella"
    for org in (None, "", 5, ["x"], "x" * 300, "\ud800", "a\nb"):
        assert name_of(tenants, token_of(org=org)) is None


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": time.time() - 60},
        {"exp": None},
        {"exp": "soon"},
        {"aud": "others"},
        {"aud": None},
        {"iss": "https://evil.example"},
        {"iss": None},
        {"nbf": time.time() + 86_400},
        {"sub": None},
        {"sub": "default"},
    ],
)
def test_a_token_with_wrong_claims_is_refused(tmp_path: Path, claims: dict[str, Any]):
    assert name_of(tenants_of(tmp_path), token_of(**claims)) is None


def test_forged_tokens_are_refused(tmp_path: Path):
    tenants = tenants_of(tmp_path)
    other = ec.generate_private_key(ec.SECP256R1())
    claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, "sub": "acme"}
    modulus = jwk_of("RS256")["n"].encode()
    forged = [
        token_of(key=other),
        token_of(headers={"kid": "unknown"}),
        token_of("ES256", headers={"kid": "RS256"}),
        token_of(headers={"crit": ["x"], "x": 1}),
        jwt.encode(claims, None, "none", headers={"kid": "ES256"}),
        jwt.encode(claims, modulus, "HS256", headers={"kid": "RS256"}),
        jwt.encode(claims, JWT_KEYS["RS256"], "PS256", headers={"kid": "RS256"}),
    ]
    assert [name_of(tenants, token) for token in forged] == [None] * len(forged)


def test_a_tampered_token_is_refused(tmp_path: Path):
    tenants = tenants_of(tmp_path)
    token = token_of()
    header, payload, signature = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    other = base64.urlsafe_b64encode(json.dumps({**claims, "sub": "x"}).encode()).decode()
    for bad in (
        f"{header}.{other.rstrip('=')}.{signature}",
        f"{header}.{payload}.",
        f"{header}.{payload}",
        f"{header}.{payload}.{signature[:-4]}AAAA",
        token[1:],
        "..",
        "a.b.c",
        "." * 5000,
        f"{header}.{payload}.{signature}.{signature}",
    ):
        assert name_of(tenants, bad) is None, bad[:80]
    assert name_of(tenants, token) == "acme"


def test_a_single_key_needs_no_id(tmp_path: Path):
    write_jwks(tmp_path, {k: v for k, v in jwk_of("EdDSA").items() if k != "kid"})
    tenants = tenants_of(tmp_path)
    claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, "sub": "acme"}
    assert name_of(tenants, jwt.encode(claims, JWT_KEYS["EdDSA"], "EdDSA")) == "acme"


def test_changed_keys_are_read_again(tmp_path: Path):
    tenants = tenants_of(tmp_path)
    write_jwks(tmp_path, jwk_of("EdDSA"))
    assert name_of(tenants, token_of("ES256")) is None
    assert name_of(tenants, token_of("EdDSA")) == "acme"
    (tmp_path / "jwks.json").write_text("{")
    assert name_of(tenants, token_of("EdDSA")) == "acme"


_SHORT = rsa.generate_private_key(65537, 1024)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([], "has no public key"),
        ([{"kty": "oct", "k": "c2VjcmV0", "kid": "x"}], "has no public key"),
        ([jwk_of("ES256", use="enc")], "has no public key"),
        ([jwk_of("RS256", alg="HS256")], "has no public key"),
        ([7], "key 0: must be a JSON object"),
        ([jwk_of("ES256", x="AA")], "key 0: is not a valid key of ES256"),
        ([jwk_of("EdDSA", d="AA")], "key 0: is a private key"),
        ([jwk_of("RS256", _SHORT)], "key 0: has fewer than 2048 bits"),
        ([jwk_of("ES256"), jwk_of("EdDSA", kid="ES256")], "each key needs a key id"),
    ],
)
def test_a_bad_key_file_is_refused(tmp_path: Path, keys: list[Any], message: str):
    write_jwks(tmp_path, *keys)
    with pytest.raises(ConfigurationError, match=message):
        tenants_of(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"keys": 3}', "{" * 5000, '{"keys": null}'])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str):
    (tmp_path / "jwks.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"--jwks-file .*: must be a JSON object"):
        tenants_of(tmp_path)


def test_the_file_of_tenants_limits_tokens_too(tmp_path: Path):
    entries = [entry_of("acme", max_priority=2)]
    path = write_tenants(tmp_path, *entries)
    tenants = tenants_of(tmp_path, tenants=path)
    assert tenants.find([token_of()]).priority(0) == 2
    with pytest.raises(PermissionDeniedError, match="this tenant may not call"):
        tenants.find([token_of(sub="stranger")])
    write_tenants(tmp_path, *entries, "{name: '*', max-priority: 5}")
    tenants.read_changes()
    assert tenants.find([token_of(sub="stranger")]).priority(0) == 5
    assert tenants.find([token_of(sub="another")]) is not tenants.find([token_of(sub="stranger")])
