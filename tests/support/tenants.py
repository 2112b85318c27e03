"""Files of tenants, tokens of clients, and a clock for their limits."""

import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from baton.common.security.tokens import hash_of_key, new_key

KEY, OTHER_KEY = new_key(), new_key()
ISSUER, AUDIENCE = "https://issuer.example", "baton"
JWT_KEYS: dict[str, Any] = {
    "RS256": rsa.generate_private_key(65537, 2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def write_tenants(folder: Path, *entries: str) -> str:
    """Writes a file of tenants."""
    path = folder / "tenants.yaml"
    temporary = folder / "tenants.tmp"
    temporary.write_text("".join(f"- {entry}\n" for entry in entries))
    temporary.replace(path)
    return str(path)


def entry_of(name: str, *keys: str, **limits: object) -> str:
    fields = {"name": name, "keys": f"[{', '.join(map(hash_of_key, keys))}]", **limits}
    return "{" + ", ".join(f"{field}: {value}" for field, value in fields.items()) + "}"


def jwk_of(algorithm: str, key: Any = None, **fields: Any) -> dict[str, Any]:
    public = (key or JWT_KEYS[algorithm]).public_key()
    jwk = jwt.get_algorithm_by_name(algorithm).to_jwk(public, as_dict=True)
    return {**jwk, "kid": algorithm, **fields}


def write_jwks(folder: Path, *keys: Any) -> str:
    path, temporary = folder / "jwks.json", folder / "jwks.tmp"
    temporary.write_text(json.dumps({"keys": keys}))
    temporary.replace(path)
    return str(path)


def token_of(algorithm: str = "ES256", *, key: Any = None, headers: Any = None, **claims: Any):
    """A good token, but for what the arguments change; a claim of None is left out."""
    good = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 60, "sub": "acme"}
    stated = {name: value for name, value in {**good, **claims}.items() if value is not None}
    headers = {"kid": algorithm, **(headers or {})}
    return jwt.encode(stated, key or JWT_KEYS[algorithm], algorithm, headers=headers)
