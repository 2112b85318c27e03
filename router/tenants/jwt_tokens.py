"""`JwtVerifier`: the tenants that signed tokens (JWT) name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jwt

from baton.common.errors import ConfigurationError
from baton.common.security.watched_files import WatchedFiles
from router.config.tenants import is_tenant_name

__all__ = ["JwtVerifier"]

_LEEWAY_S = 10
"""By how much the clocks of two machines may differ."""
_MIN_RSA_BITS = 2048
_ALGORITHMS = {("RSA", ""): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}
"""The only algorithm of a key, by its type and curve."""
_CONTENTS_ERRORS = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class _Key:
    """A public key and its algorithm. Tokens cannot choose another one."""

    key: jwt.PyJWK
    algorithm: str


class JwtVerifier:
    """Verifies tokens: their signature, issuer, audience and times.

    Args:
        path: of the public keys, a JWKS; read again when it changes.
        issuer: that tokens must name.
        audience: that tokens must name.
        tenant_claim: the claim that names the tenant.

    Raises:
        ConfigurationError: the file cannot be read, or has no key of an accepted kind.
    """

    def __init__(self, path: str, *, issuer: str, audience: str, tenant_claim: str) -> None:
        self._keys = WatchedFiles((path,), partial(_read_keys, path), "keys of tokens")
        self._issuer = issuer
        self._audience = audience
        self._tenant_claim = tenant_claim

    def tenant_name(self, token: str) -> str | None:
        """Returns the tenant that a token names; None if the token is not valid."""
        try:
            claims = self._claims(token)
        except _CONTENTS_ERRORS:
            return None
        name = claims.get(self._tenant_claim)
        return name if isinstance(name, str) and is_tenant_name(name) else None

    def _claims(self, token: str) -> dict[str, Any]:
        header = jwt.get_unverified_header(token)
        key = self._find(header.get("kid"))
        if key is None or "crit" in header or header.get("b64", True) is not True:
            return {}
        return jwt.decode(
            token,
            key=key.key,
            algorithms=[key.algorithm],
            audience=self._audience,
            issuer=self._issuer,
            leeway=_LEEWAY_S,
            options={"require": ["exp", "iss", "aud"]},
        )

    def _find(self, key_id: object) -> _Key | None:
        """The key of a token; a token without a key's id fits a file with one key."""
        keys = self._keys.current()
        if key_id is None and len(keys) == 1:
            return next(iter(keys.values()))
        return keys.get(key_id) if isinstance(key_id, str) else None


def _read_keys(path: str) -> Mapping[str, _Key]:
    where = f"--jwks-file {path}"
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
        entries = list(given["keys"])
    except OSError as error:
        raise ConfigurationError(f"{where}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConfigurationError(f"{where}: must be a JSON object with a list of keys") from None
    found = [key for i, entry in enumerate(entries) if (key := _key(f"{where}, key {i}", entry))]
    if not found:
        raise ConfigurationError(f"{where}: has no public key of RSA, P-256 or Ed25519 to verify")
    keys = {str(key.key.key_id or ""): key for key in found}
    if len(keys) < len(found):
        raise ConfigurationError(f"{where}: each key needs a key id (kid) of its own")
    return keys


def _key(where: str, entry: Any) -> _Key | None:
    """Returns an entry's key; None for one of another kind or for another use.

    Raises:
        ConfigurationError: the key is malformed, private or short.
    """
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{where}: must be a JSON object")
    algorithm = _ALGORITHMS.get((str(entry.get("kty")), str(entry.get("crv", ""))))
    is_for_this = entry.get("use", "sig") == "sig" and entry.get("alg", algorithm) == algorithm
    if algorithm is None or not is_for_this:
        return None
    if "d" in entry:
        raise ConfigurationError(f"{where}: is a private key; the router needs the public part")
    try:
        key = jwt.PyJWK(entry, algorithm)
    except _CONTENTS_ERRORS:
        raise ConfigurationError(f"{where}: is not a valid key of {algorithm}") from None
    if algorithm == "RS256" and key.key.key_size < _MIN_RSA_BITS:
        raise ConfigurationError(f"{where}: has fewer than {_MIN_RSA_BITS} bits")
    return _Key(key, algorithm)
