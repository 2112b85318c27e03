"""`LimitedProtocol` overrides methods of uvicorn that no interface promises."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.http.connection import LimitedProtocol


def test_every_overridden_method_exists_in_uvicorn():
    overridden = [
        name
        for name, method in vars(LimitedProtocol).items()
        if getattr(method, "__override__", False)
    ]
    assert len(overridden) > 5
    assert [name for name in overridden if not hasattr(HttpToolsProtocol, name)] == []
