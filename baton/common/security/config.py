"""The flags of certificates and of the credentials that processes of a cluster show each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag

__all__ = ["CertificateFiles", "CredentialsConfig"]


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Paths of PEM files, and the flags that name them in errors.

    Attributes:
        certfile: None for a process that only verifies others.
        keyfile: has no password.
        ca_certs: None: no certificates are verified.
        prefix: what the flags begin with, such as `--ssl-`.

    Raises:
        ConfigurationError: a file is missing; names the flag.
    """

    certfile: str | None = flag(
        None,
        "PEM file of this process's certificate and those between it and its CA; turns TLS on",
        name="ssl-certfile",
        metavar="FILE",
    )
    keyfile: str | None = flag(
        None,
        "PEM file of the certificate's private key",
        name="ssl-keyfile",
        metavar="FILE",
    )
    ca_certs: str | None = flag(
        None,
        "PEM file of the CAs that sign the certificates of other processes",
        name="ssl-ca-certs",
        metavar="FILE",
    )
    crlfile: str | None = flag(
        None,
        "PEM file of certificates that these CAs have revoked",
        name="ssl-crlfile",
        metavar="FILE",
    )
    prefix: str = "--ssl-"

    def __post_init__(self) -> None:
        if (self.certfile is None) != (self.keyfile is None):
            have, lack = ("certfile", "keyfile") if self.certfile else ("keyfile", "certfile")
            raise ConfigurationError(
                f"{self.prefix}{have} is set and {self.prefix}{lack} is not; set both or none"
            )
        if self.crlfile is not None and self.ca_certs is None:
            raise ConfigurationError(
                f"{self.prefix}crlfile needs {self.prefix}ca-certs, whose CAs sign it"
            )

    @property
    def paths(self) -> Sequence[tuple[str, str]]:
        """The flag and the path of each file that is set."""
        named = {
            "certfile": self.certfile,
            "keyfile": self.keyfile,
            "ca-certs": self.ca_certs,
            "crlfile": self.crlfile,
        }
        return [(self.prefix + name, path) for name, path in named.items() if path is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialsConfig:
    """The flags of the credentials that processes of a cluster show each other."""

    token_file: str | None = flag(
        None,
        "file of the token that the processes of the cluster share, made if it does not exist; "
        "its first line is sent, each line is accepted. The variable BATON_CLUSTER_TOKEN holds a "
        "token instead",
        name="cluster-token-file",
        metavar="FILE",
    )
    identities: tuple[str, ...] = flag(
        (),
        "names in the certificates of processes that belong to the cluster, comma-separated "
        "(default: each certificate that a CA of --ssl-ca-certs signed)",
        name="cluster-identities",
        metavar="NAME",
    )
    server_name: str | None = flag(
        None,
        "name that every worker's certificate has; without it, certificates must have the "
        "addresses by which workers are called",
        name="cluster-server-name",
        metavar="NAME",
    )
