"""`Tenants`: finds the tenant of a call's credentials. `TenantsFile`: the policies in a file."""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.common.errors import ConfigurationError, PermissionDeniedError, UnauthenticatedError
from baton.common.security.tokens import hash_of_key
from baton.common.security.watched_files import WatchedFiles
from router.config.entries import read_entries
from router.config.tenants import DEFAULTS_NAME, TenantPolicy, TenantsConfig
from router.processes.counts import Accounts, LocalAccounts
from router.tenants.jwt_tokens import JwtVerifier
from router.tenants.tenant import OPEN_TENANT, Clock, CountRefusal, Tenant, count_nothing

__all__ = ["KeyTable", "Tenants", "TenantsFile", "credentials_of", "read_tenants"]

FLAG_TENANT = "default"
"""The tenant of the keys of `--api-key`. No token can name it."""
_SCHEME = "bearer "
_MAX_CREDENTIAL_CHARS = 8192
_CHECK_INTERVAL_S = 0.25
_MAX_TENANTS = 10_000
"""Tenants that nothing counts against are forgotten beyond this number."""
_UNLIMITED = TenantPolicy(name="unlimited")


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


class Tenants:
    """The router's clients. Used by the event loop alone.

    Args:
        config: the flags.
        clock: seconds, monotonic.
        count_refusal: called with each refused call.
        accounts: where the use of limits is counted; None for accounts of this process.

    Attributes:
        is_open: whether callers need no credential.

    Raises:
        ConfigurationError: a file cannot be read, or is bad; names the flag.
    """

    def __init__(
        self,
        config: TenantsConfig,
        clock: Clock = time.monotonic,
        count_refusal: CountRefusal = count_nothing,
        accounts: Accounts | None = None,
    ) -> None:
        self.is_open = config.is_open
        self._clock = clock
        self._count_refusal = count_refusal
        self._accounts = accounts or LocalAccounts()
        self._flag_keys = KeyTable(dict.fromkeys(config.api_key, FLAG_TENANT))
        self._file: WatchedFiles[TenantsFile] | None = None
        if config.tenants is not None:
            self._file = WatchedFiles(
                (config.tenants,), partial(read_tenants, config.tenants), "tenants"
            )
        self._tokens: JwtVerifier | None = None
        if config.jwks_file is not None:
            self._tokens = JwtVerifier(
                config.jwks_file,
                issuer=config.jwt_issuer or "",
                audience=config.jwt_audience or "",
                tenant_claim=config.jwt_tenant_claim,
            )
        self._tenants: dict[str, Tenant] = {}
        self._most_tenants = _MAX_TENANTS

    def find(self, credentials: Iterable[str]) -> Tenant:
        """Returns the tenant of the first valid credential.

        Args:
            credentials: keys or tokens, as `credentials_of` returns them.

        Raises:
            UnauthenticatedError: no credential is valid, for whatever cause.
            PermissionDeniedError: a valid token names a tenant that may not call the router.
        """
        if self.is_open:
            return OPEN_TENANT
        file = TenantsFile() if self._file is None else self._file.last
        for credential in credentials:
            name = self._name_of(credential, file)
            if name is not None:
                return self._tenant(name, file)
        self._count_refusal("credentials")
        raise UnauthenticatedError("the call lacks a valid credential")

    def named(self, name: str) -> Tenant:
        """The tenant with a name, for whom the router works without a call.

        Raises:
            PermissionDeniedError: it may no longer call the router.
        """
        if self.is_open:
            return OPEN_TENANT
        return self._tenant(name, TenantsFile() if self._file is None else self._file.last)

    def read_changes(self) -> None:
        """Reads a changed file of tenants again. May run in any thread."""
        if self._file is not None:
            self._file.current()

    async def follow_changes(self) -> None:
        """Reads a changed file again within half a second, off the event loop. Returns at once if
        there is no file, else never.
        """
        while self._file is not None:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            await asyncio.to_thread(self.read_changes)

    def _name_of(self, credential: str, file: TenantsFile) -> str | None:
        if len(credential) > _MAX_CREDENTIAL_CHARS:
            return None
        name = self._flag_keys.find(credential) or file.keys.find(credential)
        if name is None and self._tokens is not None:
            name = self._tokens.tenant_name(credential)
            name = None if name == FLAG_TENANT else name
        return name

    def _tenant(self, name: str, file: TenantsFile) -> Tenant:
        """The tenant with a name, with its limits as they are now."""
        policy = file.policy_of(name)
        if policy is None:
            if self._file is not None and name != FLAG_TENANT:
                self._count_refusal("permission")
                raise PermissionDeniedError("this tenant may not call this router")
            policy = _UNLIMITED
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget_unused()
            account = self._accounts.account("tenant", name)
            tenant = Tenant(name, policy, self._clock, self._count_refusal, account)
            self._tenants[name] = tenant
        tenant.policy = policy
        return tenant

    def _forget_unused(self) -> None:
        if len(self._tenants) >= self._most_tenants:
            used = {name: one for name, one in self._tenants.items() if not one.is_unused}
            self._tenants = used
            self._most_tenants = max(_MAX_TENANTS, 2 * len(used))


def credentials_of(authorization: str | None, api_key: str | None) -> Sequence[str]:
    """The credentials of a call.

    Args:
        authorization: the header of that name, of the scheme Bearer.
        api_key: the header `x-api-key`, which Anthropic's clients send.
    """
    found = []
    if authorization is not None and authorization[: len(_SCHEME)].lower() == _SCHEME:
        found.append(authorization[len(_SCHEME) :].strip())
    if api_key is not None:
        found.append(api_key.strip())
    return [one for one in found if one]
