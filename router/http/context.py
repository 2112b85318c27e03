"""`HttpContext`: the served models and limits, for endpoints."""

from collections.abc import Callable
from typing import cast

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from baton.common.errors import UnavailableError
from router.chat_service import ChatService
from router.config.http import HttpConfig
from router.http.token_texts import TokenTexts
from router.models import Model, Models

__all__ = ["HttpContext", "context_of", "max_model_len"]


class HttpContext:
    """The served models and the limits, for endpoints.

    Args:
        models: the served models.
        config: the limits.
        metrics: what Prometheus reads.
        admits_reader: whether a reader with an authorization header may read them.

    Attributes:
        is_draining: whether the router takes no more connections, and waits for its requests.
    """

    def __init__(
        self,
        models: Models,
        config: HttpConfig,
        metrics: CollectorRegistry,
        admits_reader: Callable[[str | None], bool],
    ) -> None:
        self.models = models
        self.config = config
        self.metrics = metrics
        self.admits_reader = admits_reader
        self.is_draining = False
        self._token_texts: dict[str, TokenTexts] = {}
        self._chats = {model.name: ChatService(model) for model in models}

    def chat(self, model: Model) -> ChatService:
        """The chat service of a model."""
        return self._chats[model.name]

    def token_texts(self, model: Model) -> TokenTexts:
        """The texts of a model's tokens."""
        if model.name not in self._token_texts:
            self._token_texts[model.name] = TokenTexts(model.tokenizer)
        return self._token_texts[model.name]


def context_of(request: Request) -> HttpContext:
    """The context of the request's application."""
    return cast("HttpContext", request.app.state.context)


def max_model_len(model: Model) -> int | None:
    """The model's context length; None while no replica is connected."""
    try:
        return model.fleet.require_model()[1].max_model_len
    except UnavailableError:
        return None
