"""`RouterSecurityConfig`: the flags of the router's certificates and credentials."""

import argparse
import ssl
from dataclasses import dataclass, field

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import config_from_args, flag, flags_of_config
from baton.common.security.config import CertificateFiles, CredentialsConfig
from router.config.tenants import TenantsConfig

__all__ = ["PLAIN_CALLS", "ClientTlsConfig", "RouterSecurityConfig", "WorkerTlsConfig"]

PLAIN_CALLS = "none"
"""Value of `--cluster-ssl-ca-certs` that turns TLS towards workers off."""
_VERIFY_MODES = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
_CLUSTER_PREFIX = "--cluster-ssl-"


def _cert_reqs(text: str) -> str:
    """Parses `--ssl-cert-reqs`: a name, or its number in Python's ssl module, as vLLM takes it."""
    names = {str(mode.value): name for name, mode in _VERIFY_MODES.items()}
    name = names.get(text, text)
    if name not in _VERIFY_MODES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_VERIFY_MODES)}")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTlsConfig(CertificateFiles):
    """The flags of the certificates that the router shows to clients, and asks of them."""

    ssl_cert_reqs: str = flag(
        "none",
        "whether clients need a certificate that a CA of --ssl-ca-certs signed: none, optional "
        "(HTTP verifies what a client sends, gRPC asks for none) or required",
        parse=_cert_reqs,
        metavar="WHICH",
    )

    @property
    def verify_mode(self) -> ssl.VerifyMode:
        """`ssl_cert_reqs` as Python's ssl module has it."""
        return _VERIFY_MODES[self.ssl_cert_reqs]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTlsConfig:
    """The flags of the certificates that the router shows to workers, and asks of them."""

    cluster_ssl_certfile: str | None = flag(
        None,
        "PEM file of the certificate that the router shows to workers (default: --ssl-certfile)",
        metavar="FILE",
    )
    cluster_ssl_keyfile: str | None = flag(
        None, "PEM file of that certificate's private key (default: --ssl-keyfile)", metavar="FILE"
    )
    cluster_ssl_ca_certs: str | None = flag(
        None,
        "PEM file of the CAs that sign the workers' certificates, which turns TLS towards workers "
        "on; none turns it off (default: --ssl-ca-certs)",
        metavar="FILE",
    )
    cluster_ssl_crlfile: str | None = flag(
        None,
        "PEM file of certificates that these CAs have revoked (default: --ssl-crlfile, if the CAs "
        "are those of --ssl-ca-certs)",
        metavar="FILE",
    )

    def files(self, clients: CertificateFiles) -> CertificateFiles | None:
        """The paths of the files; None for calls without TLS.

        Args:
            clients: the files that are the defaults.

        Raises:
            ConfigurationError: a file is missing; names the flag.
        """
        own_pair = self.cluster_ssl_certfile, self.cluster_ssl_keyfile
        own_cas, own_crl = self.cluster_ssl_ca_certs, self.cluster_ssl_crlfile
        if own_cas == PLAIN_CALLS:
            return None
        has_pair = own_pair != (None, None)
        if not (has_pair or own_cas or own_crl):
            return clients if clients.ca_certs else None
        certfile, keyfile = own_pair if has_pair else (clients.certfile, clients.keyfile)
        ca_certs = own_cas or clients.ca_certs
        if ca_certs is None:
            raise ConfigurationError(
                f"{_CLUSTER_PREFIX}ca-certs is missing; workers' certificates are verified with it"
            )
        crlfile = own_crl or (None if own_cas else clients.crlfile)
        return CertificateFiles(certfile, keyfile, ca_certs, crlfile, _CLUSTER_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSecurityConfig:
    """The router's certificates and credentials.

    Attributes:
        clients: certificates towards clients.
        workers: certificates towards workers.
        cluster: the token and the names of the cluster's processes.
        tenants: who may call the router.

    Raises:
        ConfigurationError: a file is missing; names the flag.
    """

    clients: ClientTlsConfig = field(default_factory=ClientTlsConfig)
    workers: WorkerTlsConfig = field(default_factory=WorkerTlsConfig)
    cluster: CredentialsConfig = field(default_factory=CredentialsConfig)
    tenants: TenantsConfig = field(default_factory=TenantsConfig)

    def __post_init__(self) -> None:
        clients = self.clients
        _ = self.worker_files  # refuses half of a pair
        if clients.ssl_cert_reqs == "none":
            return
        for name in ("certfile", "ca_certs"):
            if getattr(clients, name) is None:
                raise ConfigurationError(
                    f"--ssl-cert-reqs is {clients.ssl_cert_reqs}; it needs "
                    f"--ssl-{name.replace('_', '-')}"
                )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "RouterSecurityConfig":
        """The config that parsed flags describe."""
        return cls(
            clients=config_from_args(ClientTlsConfig, args),
            workers=config_from_args(WorkerTlsConfig, args),
            cluster=config_from_args(CredentialsConfig, args),
            tenants=config_from_args(TenantsConfig, args),
        )

    def flags(self) -> list[str]:
        """The flags that describe it, without keys: `ps` shows flags to all users."""
        return [
            *flags_of_config(self.clients),
            *flags_of_config(self.workers),
            *flags_of_config(self.cluster),
            *flags_of_config(self.tenants, omit=("api_key",)),
        ]

    @property
    def worker_files(self) -> CertificateFiles | None:
        """Paths of the certificates for calls to workers; None for calls without TLS."""
        return self.workers.files(self.clients)
