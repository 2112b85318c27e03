"""`EndpointSlices`: lists and watches the EndpointSlices of a Service, by HTTPS.

It calls the API server as each pod can: with the token and the CA of its service account. The
token changes about every hour, so both files are read for each call.
"""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.common.addresses import join_host_port
from baton.common.errors import ConfigurationError

if TYPE_CHECKING:
    import httpx2

__all__ = ["EndpointSlices", "KubernetesError", "VersionGoneError"]

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 10.0
_WATCH_S = 60
"""The server ends a watch after this time. A connection that is dead is noticed soon after it."""
_WATCH_GRACE_S = 15.0
_PAGE = 500
_MAX_LIST_BYTES = 64 * 2**20
_MAX_EVENT_BYTES = 4 * 2**20
_MAX_REASON_CHARS = 200

_HTTP_UNAUTHORIZED, _HTTP_FORBIDDEN, _HTTP_GONE = 401, 403, 410


class KubernetesError(Exception):
    """The API server cannot be reached, refuses a call, or answers nonsense."""


class VersionGoneError(Exception):
    """The server no longer has the events since a version; a new list is needed."""


class EndpointSlices:
    """The EndpointSlices of one Service.

    Args:
        server: URL of the API server.
        account: folder with the service account's `token` and `ca.crt`.
        namespace: of the Service.
        service: its name.
    """

    def __init__(self, server: str, account: Path, namespace: str, service: str) -> None:
        self._account = account
        self._url = f"{server}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._service = service

    @classmethod
    def in_cluster(cls, namespace: str, service: str) -> "EndpointSlices":
        """The slices as a pod of the cluster sees them.

        Raises:
            ConfigurationError: this process is in no pod.
        """
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not port.isdecimal():
            raise ConfigurationError(
                f"target k8s:///{namespace}/{service}: KUBERNETES_SERVICE_HOST is not set, so this "
                "is no pod of Kubernetes; outside of one, name the Service by dns:///name:port"
            )
        server = f"https://{join_host_port(host, int(port))}"
        return cls(server, ACCOUNT_FOLDER, namespace, service)

    async def list(self) -> tuple[Sequence[Mapping[str, Any]], str]:
        """Returns all slices, and the version from which they can be watched.

        Raises:
            KubernetesError: the list cannot be read.
            VersionGoneError: the list changed too much while its pages were read.
        """
        slices: list[Mapping[str, Any]] = []
        params: dict[str, str | int] = {"limit": _PAGE}
        num_bytes = 0
        while True:
            async with self._get(params, _TIMEOUT_S) as response:
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    num_bytes += len(chunk)
                    if num_bytes > _MAX_LIST_BYTES:
                        raise KubernetesError(f"the list has more than {_MAX_LIST_BYTES} bytes")
            page = await asyncio.to_thread(_parse, body)
            slices += page.get("items") or ()
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return slices, str(metadata.get("resourceVersion", ""))
            params["continue"] = metadata["continue"]

    async def watch(self, version: str) -> AsyncGenerator[tuple[str, Mapping[str, Any]], None]:
        """Yields the kind and the object of each event until the server ends the watch.

        Args:
            version: that of the list, or of the last event.

        Raises:
            KubernetesError: the connection was lost, or the server refuses.
            VersionGoneError: the server no longer has the events since that version.
        """
        params: dict[str, str | int] = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": _WATCH_S,
        }
        async with self._get(params, _WATCH_S + _WATCH_GRACE_S) as response:
            rest = b""
            async for chunk in response.aiter_bytes():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    yield _event(_parse(line))
                if len(rest) > _MAX_EVENT_BYTES:
                    raise KubernetesError(f"an event has more than {_MAX_EVENT_BYTES} bytes")

    @asynccontextmanager
    async def _get(
        self, params: Mapping[str, str | int], timeout_s: float
    ) -> AsyncIterator["httpx2.Response"]:
        """Opens a call; yields its response, whose status is 200."""
        import httpx2  # here: a router that is not in Kubernetes starts without it

        query = {"labelSelector": f"kubernetes.io/service-name={self._service}", **params}
        timeout = httpx2.Timeout(_TIMEOUT_S, read=timeout_s)
        try:
            token, context = await asyncio.to_thread(self._read_account)
            headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
            async with (
                httpx2.AsyncClient(
                    verify=context, headers=headers, timeout=timeout, trust_env=False
                ) as client,
                client.stream("GET", self._url, params=query) as response,
            ):
                _check_status(response.status_code)
                yield response
        except (OSError, httpx2.HTTPError, UnicodeError) as error:
            reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
            raise KubernetesError(reason) from error

    def _read_account(self) -> tuple[str, ssl.SSLContext]:
        """Reads the files of the service account. Blocks."""
        token = (self._account / "token").read_text().strip()
        return token, ssl.create_default_context(cafile=str(self._account / "ca.crt"))


def _check_status(status: int) -> None:
    if status == _HTTP_GONE:
        raise VersionGoneError
    if status in (_HTTP_UNAUTHORIZED, _HTTP_FORBIDDEN):
        raise KubernetesError(
            f"HTTP status {status}: the service account may not get, list and watch "
            "endpointslices of discovery.k8s.io here (deploy/kubernetes/router-rbac.yaml)"
        )
    if status != 200:
        raise KubernetesError(f"HTTP status {status}")


def _parse(body: bytes | bytearray) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except ValueError:
        raise KubernetesError("the answer is no JSON") from None
    if not isinstance(parsed, dict):
        raise KubernetesError("the answer is no JSON object")
    return parsed


def _event(event: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns the kind and the object of an event.

    Raises:
        VersionGoneError: the event says so.
        KubernetesError: it is another error, or no event.
    """
    kind, item = event.get("type"), event.get("object")
    if not isinstance(kind, str) or not isinstance(item, dict):
        raise KubernetesError("the answer is no event of a watch")
    if kind == "ERROR":
        if item.get("code") == _HTTP_GONE:
            raise VersionGoneError
        raise KubernetesError(str(item.get("message", "an error"))[:_MAX_REASON_CHARS])
    return kind, item
