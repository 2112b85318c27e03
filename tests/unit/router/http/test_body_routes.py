"""The endpoints of `BodyRoute`."""

from inspect import signature

from router.http import batches, completions, render, responses, tokens
from router.http.anthropic import ENDPOINTS as ANTHROPIC
from router.http.body_route import BodyRoute
from router.http.chat import ENDPOINTS as CHAT


def test_endpoints_with_bodies_take_nothing_else():
    """`BodyRoute` calls them without FastAPI, which alone would pass what else they declare."""
    modules = batches, completions, render, responses, tokens
    groups = (ANTHROPIC, CHAT, *(module.ENDPOINTS for module in modules))
    routes = [route for group in groups for route in group.router.routes]
    with_bodies = [route for route in routes if isinstance(route, BodyRoute)]
    assert len(with_bodies) == 11
    for route in with_bodies:
        assert set(signature(route.endpoint).parameters) == {"body", "request"}, route.path
        assert not route.dependencies, route.path
