"""`TenantsFile`: the policies of the file of tenants, by name and by key."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from baton.common.errors import ConfigurationError
from baton.common.security.api_keys import hash_of_key
from router.config.entries import read_entries
from router.config.tenants import DEFAULTS_NAME, TenantPolicy

__all__ = ["KeyTable", "TenantsFile", "read_tenants"]


class KeyTable:
    """Names by hashes of keys.

    A look-up takes the same time for all keys: it compares digests that are made with a random
    key of this process, so that no time says how much of a hash fits.

    Args:
        names: by hash of a key.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._secret = secrets.token_bytes(32)
        self._names = {self._digest(one): name for one, name in names.items()}

    def find(self, key: str) -> str | None:
        """Returns the name that belongs to a key; None if there is none."""
        return self._names.get(self._digest(hash_of_key(key)))

    def _digest(self, hashed: str) -> bytes:
        return hmac.digest(self._secret, hashed.encode(), hashlib.sha256)


@dataclass(frozen=True, slots=True)
class TenantsFile:
    """The content of a file of tenants.

    Attributes:
        policies: by tenant's name.
        keys: finds a tenant's name.
    """

    policies: Mapping[str, TenantPolicy] = field(default_factory=dict)
    keys: KeyTable = field(default_factory=lambda: KeyTable({}))

    def policy_of(self, name: str) -> TenantPolicy | None:
        """The entry of a tenant, or the one for all others; None if there is none."""
        return self.policies.get(name) or self.policies.get(DEFAULTS_NAME)


def read_tenants(path: str) -> TenantsFile:
    """Reads a file of tenants.

    Raises:
        ConfigurationError: the file cannot be read, or is bad; names the entry. Keys are not
            shown.
    """
    policies = read_entries("--tenants", path, TenantPolicy)
    by_name = {policy.name: policy for policy in policies}
    if len(by_name) < len(policies):
        raise ConfigurationError(f"--tenants {path}: two entries have the same name")
    return TenantsFile(by_name, KeyTable(_names_of_keys(path, policies)))


def _names_of_keys(path: str, policies: Iterable[TenantPolicy]) -> dict[str, str]:
    names: dict[str, str] = {}
    for policy in policies:
        for key in policy.keys:
            other = names.setdefault(key, policy.name)
            if other != policy.name:
                raise ConfigurationError(
                    f"--tenants {path}: {other!r} and {policy.name!r} have the same key"
                )
    return names
