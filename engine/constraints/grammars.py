"""`Grammars`: compiles the constraints of an engine's requests."""

from collections.abc import Callable
from concurrent.futures import Future

from baton.common.errors import ConfigurationError, FailedPreconditionError
from baton.common.request.structured_outputs import StructuredOutputs
from engine.config import EngineConfig
from engine.constraints.backends import check_installed
from engine.constraints.compiler import CompileLimits, GrammarCompiler
from engine.constraints.matcher import Constraint
from engine.constraints.retokenizer import Retokenizer
from engine.constraints.vocabulary import Vocabulary
from engine.metrics.counts import EngineMetrics
from engine.runner import ModelInfo
from engine.runtime.weights.checkpoint import open_checkpoint

__all__ = ["Grammars"]


class Grammars:
    """Compiles the constraints of one model's requests. Thread-safe.

    The tokenizer and the grammar backends are loaded with the first constraint, so engines
    without constrained requests have neither.

    Args:
        config: the engine's; names the model and the backend.
        info: the model's facts.
        on_compiled: called by any thread when a future of `compile` has ended.
        metrics: counts the grammars; None discards them.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        on_compiled: Callable[[], None],
        metrics: EngineMetrics | None = None,
    ) -> None:
        self._config, self._info = config, info
        self._on_compiled = on_compiled
        self._retokenizer: Retokenizer | None = None
        max_whitespace = config.structured_outputs_max_whitespace
        limits = CompileLimits(
            timeout_s=config.grammar_timeout_s,
            cache_bytes=config.grammar_cache_bytes,
            max_whitespace=None if max_whitespace == -1 else max_whitespace,
        )
        self._compiler = GrammarCompiler(
            self._load_vocabulary,
            backend=config.structured_outputs_backend,
            limits=limits,
            metrics=metrics,
        )

    @property
    def retokenizer(self) -> Retokenizer:
        """The model's retokenizer; available once a constraint has been compiled."""
        assert self._retokenizer is not None, "no constraint has been compiled yet"
        return self._retokenizer

    def check(self) -> None:
        """Refuses constrained requests if the chosen backend is not installed.

        Raises:
            FailedPreconditionError: names the command that installs it.
        """
        try:
            check_installed(self._config.structured_outputs_backend)
        except ConfigurationError as error:
            raise FailedPreconditionError(str(error)) from None

    def compile(self, outputs: StructuredOutputs, owner: str = "") -> "Future[Constraint]":
        """Returns the future of a constraint that `check` allows: `GrammarCompiler.compile`'s."""
        future = self._compiler.compile(outputs, owner)
        future.add_done_callback(lambda _: self._on_compiled())
        return future

    def close(self) -> None:
        """Ends the compiler; pending futures fail. Idempotent."""
        self._compiler.close()

    def _load_vocabulary(self) -> Vocabulary:
        """Loads the tokenizer; a worker thread of the compiler calls it.

        Raises:
            ConfigurationError: the tokenizer cannot be used for constrained output.
        """
        checkpoint = open_checkpoint(self._config.model, with_weights=False)
        tokenizer = checkpoint.files.load_tokenizer()
        vocabulary = Vocabulary.of(
            tokenizer, vocab_size=self._info.vocab_size, eos_token_ids=self._info.eos_token_ids
        )
        self._retokenizer = Retokenizer(tokenizer, vocabulary)
        return vocabulary
