"""`TenantsConfig`: the flags of the router's clients. `TenantPolicy`: what one of them may do."""

from dataclasses import MISSING, dataclass

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag
from baton.common.flags.values import count
from baton.common.security.tokens import key_entry

__all__ = ["API_KEY_VARIABLE", "DEFAULTS_NAME", "TenantPolicy", "TenantsConfig", "is_tenant_name"]

API_KEY_VARIABLE = "BATON_API_KEY"
DEFAULTS_NAME = "*"
"""The name of the entry for tenants without an entry of their own."""
_MAX_NAME_CHARS = 256
_PRIORITIES = 2**31
_MAX_WEIGHT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantsConfig:
    """The flags of the router's clients. Without any of them, everybody may call the router.

    Attributes:
        api_key: the hashes of the keys, so that no representation of a config has a key.

    Raises:
        ConfigurationError: a key is bad, or a flag lacks another; names the flag.
    """

    api_key: tuple[str, ...] = flag(
        (),
        "key that clients must send, comma-separated, repeatable; better set by the variable "
        "BATON_API_KEY, as a command line is visible to other users of the machine",
        metavar="KEY",
        is_main=True,
    )
    tenants: str | None = flag(
        None,
        "YAML file of the clients' names, hashed keys and limits, read again when it changes; see "
        "docs/tenants.md",
        metavar="FILE",
    )
    jwks_file: str | None = flag(
        None,
        "file of the public keys (JWKS) of clients' tokens (JWT), read again when it changes",
        metavar="FILE",
    )
    jwt_issuer: str | None = flag(None, "issuer that tokens must name (iss)", metavar="NAME")
    jwt_audience: str | None = flag(None, "audience that tokens must name (aud)", metavar="NAME")
    jwt_tenant_claim: str = flag("sub", "claim of a token that names its tenant", metavar="CLAIM")

    def __post_init__(self) -> None:
        hashes = tuple(key_entry(key, "--api-key", takes_keys=True) for key in self.api_key)
        object.__setattr__(self, "api_key", hashes)
        issuing = {"--jwt-issuer": self.jwt_issuer, "--jwt-audience": self.jwt_audience}
        for name, value in issuing.items():
            if self.jwks_file is not None and not value:
                raise ConfigurationError(f"{name} is missing; --jwks-file needs it")
            if self.jwks_file is None and value:
                raise ConfigurationError(f"{name} is set; it needs --jwks-file")
        if not self.jwt_tenant_claim:
            raise ConfigurationError("--jwt-tenant-claim is empty; it must name a claim")

    @property
    def environment(self) -> dict[str, str]:
        """The variable by which another process gets the keys, as hashes; empty without keys."""
        return {API_KEY_VARIABLE: ",".join(self.api_key)}

    @property
    def is_open(self) -> bool:
        """Whether callers need no credential."""
        return not self.api_key and self.tenants is None and self.jwks_file is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPolicy:
    """The permissions of a tenant: an entry of the file of tenants, with the fields' names as keys.

    Attributes:
        name: the tenant's; `*` for all that have no entry.
        keys: hashes of its API keys.
        max_priority: the most urgent priority that its requests may have; lower is sooner.
        requests_per_minute: the most calls, and further prompts of a call, that begin.
        tokens_per_minute: the most tokens of prompts and answers.
        max_concurrent_requests: the most calls, and further prompts of a call, at the same time.
        models: names of the models that it may use; empty for all.
        weight: under overload it gets as much as this number of tenants of weight 1.

    Raises:
        ConfigurationError: a value is out of range; names the field.
    """

    name: str = flag(MISSING, "the tenant's name")
    keys: tuple[str, ...] = flag((), "hashes of its keys", is_list=True)
    max_priority: int | None = flag(None, "most urgent priority")
    requests_per_minute: int | None = flag(None, "most requests per minute", parse=count)
    tokens_per_minute: int | None = flag(None, "most tokens per minute", parse=count)
    max_concurrent_requests: int | None = flag(None, "most running requests", parse=count)
    models: tuple[str, ...] = flag((), "models that it may use", is_list=True)
    weight: int = flag(1, "share of the replicas under overload", parse=count)

    def __post_init__(self) -> None:
        if not is_tenant_name(self.name):
            raise ConfigurationError(f"name must have 1 to {_MAX_NAME_CHARS} printable characters")
        if self.name == DEFAULTS_NAME and self.keys:
            raise ConfigurationError(f"the entry {DEFAULTS_NAME} is no tenant; it has no keys")
        for key in self.keys:
            key_entry(key, "keys", takes_keys=False)
        if abs(self.max_priority or 0) >= _PRIORITIES:
            raise ConfigurationError(f"max-priority is {self.max_priority}; it must have 32 bits")
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                shown = name.replace("_", "-")
                raise ConfigurationError(f"{shown} is {value}; it must be >= 1")
        if not 1 <= self.weight <= _MAX_WEIGHT:
            raise ConfigurationError(f"weight is {self.weight}; it must be in [1, {_MAX_WEIGHT}]")


def is_tenant_name(text: str) -> bool:
    """Whether a text can name a tenant: it is not too long for a log line or a metric's label, and
    has no characters that these could not show, such as half of a surrogate pair.
    """
    return 0 < len(text) <= _MAX_NAME_CHARS and text.isprintable()
