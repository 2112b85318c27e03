"""The files of the page: markup, styles and scripts, without any request to another server."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from router.http.endpoints import EndpointGroup
from router.http.page.paths import FILES

__all__ = ["ENDPOINTS"]

_ROUTER = APIRouter()
ENDPOINTS = EndpointGroup(_ROUTER)
_METHODS = ["GET", "HEAD"]
_MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Scripts and styles are those of this server, and a text never becomes markup: what an answer
    # or a name contains can neither run nor load anything.
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",  # a browser asks whether its copy is still right
}


@dataclass(frozen=True, slots=True)
class _Asset:
    """A file.

    Attributes:
        body: its bytes.
        media_type: the header Content-Type.
        etag: differs between files with different bytes.
    """

    body: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> "_Asset":
        """Returns a file of the package."""
        body = path.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        return cls(body, f"{_MEDIA_TYPES[path.suffix]}; charset=utf-8", etag)


_ASSETS: Mapping[str, _Asset] = {path: _Asset.read(file) for path, file in FILES.items()}


@_ROUTER.api_route("/", methods=_METHODS, include_in_schema=False)
@_ROUTER.api_route("/page/{name}", methods=_METHODS, include_in_schema=False)
async def get_asset(request: Request) -> Response:
    """Returns the page, or one of its files."""
    asset = _ASSETS.get(request.scope["path"])
    if asset is None:
        raise HTTPException(404)
    headers = _HEADERS | {"ETag": asset.etag, "Content-Type": asset.media_type}
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(asset.body, headers=headers)
