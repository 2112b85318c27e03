"""`Grammars`: the compiler of an engine's constraints, loaded with the first of them."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from baton.errors import (
    BatonError,
    ConfigurationError,
    FailedPreconditionError,
    InternalError,
    UnavailableError,
)
from baton.structured_outputs import StructuredOutputs
from baton.tokenizer_files import load_tokenizer
from engine.config import EngineConfig
from engine.constraints.backends import check_installed
from engine.constraints.compiler import CompileLimits, GrammarCompiler
from engine.constraints.matcher import Constraint
from engine.constraints.retokenizer import Retokenizer
from engine.constraints.vocabulary import Vocabulary
from engine.runner import ModelInfo
from engine.runtime.checkpoint import open_checkpoint

__all__ = ["Grammars"]

_logger = logging.getLogger("baton.engine")


class Grammars:
    """Compiles the constraints of one model's requests. Thread-safe.

    The tokenizer and the compiler are loaded in a thread of their own when the first constraint
    comes, so engines without constrained requests have neither.

    Args:
        config: the engine's; names the model and the backend.
        info: the model's facts.
        on_compiled: called by any thread when a future of `compile` has ended.
    """

    def __init__(
        self, config: EngineConfig, info: ModelInfo, on_compiled: Callable[[], None]
    ) -> None:
        self._config, self._info = config, info
        self._on_compiled = on_compiled
        self._lock = threading.Lock()
        self._loaded: Future[tuple[GrammarCompiler, Retokenizer]] | None = None
        self._is_closed = False

    @property
    def retokenizer(self) -> Retokenizer:
        """Of the model's tokenizer; there once a constraint has been compiled."""
        assert self._loaded is not None, "no constraint has been compiled yet"
        return self._loaded.result(timeout=0)[1]

    def check(self) -> None:
        """Refuses constrained requests if no backend is installed.

        Raises:
            FailedPreconditionError: says what to install.
        """
        try:
            check_installed(self._config.structured_outputs_backend)
        except ConfigurationError as error:
            raise FailedPreconditionError(str(error)) from None

    def compile(self, outputs: StructuredOutputs) -> "Future[Constraint]":
        """Returns the future of a compiled constraint.

        Its exception is a BatonError: those of `GrammarCompiler.compile`, or a
        FailedPreconditionError if the model's tokenizer cannot be used.
        """
        result: Future[Constraint] = Future()
        result.add_done_callback(lambda _: self._on_compiled())

        def pass_on(compiled: "Future[Constraint]") -> None:
            if (error := compiled.exception()) is not None:
                result.set_exception(error)
            else:
                result.set_result(compiled.result())

        def start(loaded: "Future[tuple[GrammarCompiler, Retokenizer]]") -> None:
            if (error := loaded.exception()) is not None:
                result.set_exception(error)
            else:
                loaded.result()[0].compile(outputs).add_done_callback(pass_on)

        self._load().add_done_callback(start)
        return result

    def close(self) -> None:
        """Ends the compiler; pending futures fail. Idempotent."""
        with self._lock:
            self._is_closed = True
            loaded = self._loaded
        if loaded is not None and loaded.exception() is None:
            loaded.result()[0].close()

    def _load(self) -> "Future[tuple[GrammarCompiler, Retokenizer]]":
        with self._lock:
            if self._loaded is None:
                self._loaded = Future()
                if self._is_closed:
                    self._loaded.set_exception(UnavailableError("the worker is stopping"))
                else:
                    self._start_loading(self._loaded)
            return self._loaded

    def _start_loading(self, loaded: "Future[tuple[GrammarCompiler, Retokenizer]]") -> None:
        thread = threading.Thread(
            target=self._run_load, args=(loaded,), name="grammars", daemon=True
        )
        thread.start()

    def _run_load(self, loaded: "Future[tuple[GrammarCompiler, Retokenizer]]") -> None:
        try:
            parts = self._load_parts()
        except ConfigurationError as error:
            loaded.set_exception(FailedPreconditionError(str(error)))
        except BatonError as error:
            loaded.set_exception(error)
        except BaseException:
            _logger.exception("the grammar compiler could not be loaded")
            error_of_all = InternalError("the grammar compiler could not be loaded")
            loaded.set_exception(error_of_all)
        else:
            loaded.set_result(parts)

    def _load_parts(self) -> tuple[GrammarCompiler, Retokenizer]:
        config = self._config
        checkpoint = open_checkpoint(config.model, with_weights=False)
        tokenizer = load_tokenizer(checkpoint.folder)
        vocabulary = Vocabulary.of(
            tokenizer, vocab_size=self._info.vocab_size, eos_token_ids=self._info.eos_token_ids
        )
        limits = CompileLimits(
            timeout_s=config.grammar_timeout_s, cache_bytes=config.grammar_cache_bytes
        )
        compiler = GrammarCompiler(
            vocabulary, backend=config.structured_outputs_backend, limits=limits
        )
        return compiler, Retokenizer(tokenizer, vocabulary)
