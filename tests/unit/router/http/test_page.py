"""The page's files, and odd requests for them."""

import random
import re
from functools import cache

from router.config.http import HttpConfig
from router.config.tenants import TenantsConfig
from router.http.app import build_app
from router.http.page.paths import ASSET_PATHS, FILES
from router.tenants.tenants import Tenants
from tests.support.asgi_calls import Answer, call_app
from tests.support.odd_requests import OddRequest

KEY = "a-key-of-this-test"
HOSTILE = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "javascript:alert(1)")
NUM_ODD_REQUESTS = 1000


@cache
def app(*, keys: bool = False, **http):
    tenants = Tenants(TenantsConfig(api_key=(KEY,) if keys else ()))
    return build_app((), HttpConfig(**http), tenants)


async def get(path: str, *headers: tuple[bytes, bytes], method: str = "GET", of=None) -> Answer:
    return await call_app(of or app(), OddRequest(method, path, headers=headers))


async def test_the_page_loads_only_its_own_files():
    answer = await get("/")
    assert (answer.status, answer.content_type) == (200, "text/html")
    page = answer.body.decode()
    linked = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert {f"/{path}" for path in linked} <= ASSET_PATHS
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", page)


async def test_scripts_import_only_the_pages_scripts():
    names = {path.name for path in FILES.values()}
    for path in FILES.values():
        if path.suffix == ".js":
            imported = re.findall(r'(?:from|import)\s*\(?"([^"]+)"', path.read_text())
            assert {name.removeprefix("./") for name in imported} <= names


def test_no_text_becomes_markup_or_code():
    for path in FILES.values():
        text = path.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
            r"|DOMParser|srcdoc|url\(",
            text.replace("url(path)", "").replace('url("', ""),
        ), path


async def test_every_file_has_the_headers_that_keep_others_out():
    for path, file in FILES.items():
        answer = await get(path)
        assert (answer.status, answer.body) == (200, file.read_bytes())
        policy = answer.headers[b"content-security-policy"].decode().split("; ")
        assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} <= set(policy)
        assert not any("unsafe" in part or "*" in part for part in policy)
        assert answer.headers[b"x-content-type-options"] == b"nosniff"
        head = await get(path, method="HEAD")
        assert (head.status, head.headers[b"etag"]) == (200, answer.headers[b"etag"])


async def test_a_browser_with_a_right_copy_gets_none():
    etag = (await get("/")).headers[b"etag"]
    again = await get("/", (b"if-none-match", etag))
    assert (again.status, again.body) == (304, b"")
    assert (await get("/", (b"if-none-match", b'"other"'))).status == 200


async def test_keys_close_the_api_and_not_the_files():
    closed = app(keys=True)
    for path in ("/", "/page/main.js"):
        assert (await get(path, of=closed)).status == 200
    for path in ("/v1/models", "/page/none.js"):
        assert (await get(path, of=closed)).status == 401


async def test_a_flag_turns_the_page_off():
    off = app(page=False)
    for path in (*ASSET_PATHS, "/status"):
        assert (await get(path, of=off)).status == 404
    assert (await get("/health", of=off)).status == 200


def odd_path(rng: random.Random) -> str:
    known = rng.choice([*ASSET_PATHS, "/status", "/page/", "/page"])
    parts = ["..", "%2e%2e", "//", "\\", "\0", "é", ".", ";", "?", "#", "%", "a" * 300, *HOSTILE]
    changes = [
        lambda: known + rng.choice(parts),
        lambda: known.replace("/", rng.choice(["/../", "//", "/./"])),
        lambda: f"/page/{rng.choice(parts)}",
        lambda: f"/page/../{rng.choice(parts)}/etc/passwd",
        lambda: known.upper(),
        lambda: known,
    ]
    return rng.choice(changes)()


def odd_headers(rng: random.Random) -> list[tuple[bytes, bytes]]:
    names = ["authorization", "if-none-match", "host", "range", "accept", "cookie", "x-request-id"]
    values = [b"", b"\xff\xfe", b"[", b"*", b"Bearer ", b"bytes=0-1", b"a" * 5000]
    values += [text.encode() for text in HOSTILE]
    return [(rng.choice(names).encode(), rng.choice(values)) for _ in range(rng.randrange(4))]


async def test_odd_requests_get_no_500_and_none_of_their_text_as_markup():
    rng, served = random.Random(41), app(keys=True)
    methods = ["GET"] * 4 + ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "<script>", ""]
    files = {path.read_bytes() for path in FILES.values()} | {b""}
    for _ in range(NUM_ODD_REQUESTS):
        request = OddRequest(
            rng.choice(methods), odd_path(rng), rng.randbytes(20), tuple(odd_headers(rng))
        )
        answer = await call_app(served, request)
        assert answer.status < 500, request
        is_markup = answer.content_type not in ("application/json", "")
        assert not is_markup or answer.body in files, request
