"""`GrammarCompiler`: compiles grammars beside the engine, caches them, and bounds both."""

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Literal

from baton.common.errors import (
    BatonError,
    ConfigurationError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    Reason,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.backends import installed_backends, load_backend
from engine.constraints.compile_process import CompileProcess, JobLostError, JobTimeoutError
from engine.constraints.fair_queue import FairQueue
from engine.constraints.interface import MAX_WHITESPACE, Backend
from engine.constraints.matcher import Constraint
from engine.constraints.structural_tags import texts_of_tag
from engine.constraints.vocabulary import Vocabulary
from engine.metrics.counts import EngineMetrics

__all__ = ["CompileLimits", "GrammarCompiler", "marks_of"]

_logger = logging.getLogger("baton.engine")

_LARGE_HINT_CHARS = 2048
_RETRY_AFTER_S = 1.0
_Waiting = tuple[bytes, StructuredOutputs]  # with its key


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileLimits:
    """Bounds of a `GrammarCompiler`.

    Attributes:
        timeout_s: the most CPU time for compiling one grammar. On the clock it may take three
            times that, once it has begun.
        memory_bytes: the most memory that compiling one grammar may take.
        cache_bytes: the most memory of cached grammars. What sequences use stays besides.
        num_workers: grammars that compile at the same time.
        max_waiting: grammars that may wait or compile; further ones are refused.
        refusal_s: how long a refusal is remembered, so that a grammar that timed out does not
            take the time again for each of its requests.
        max_whitespace: the most characters of whitespace between two tokens of JSON; None for
            any number.
    """

    timeout_s: float = 10.0
    memory_bytes: int = 1 << 30
    cache_bytes: int = 256 << 20
    num_workers: int = 2
    max_waiting: int = 256
    refusal_s: float = 60.0
    max_whitespace: int | None = MAX_WHITESPACE


class GrammarCompiler:
    """Compiles constraints. Thread-safe.

    Grammars are compiled in a process of their own (`engine.constraints.compile_server`), which
    starts with the first of them. A grammar is compiled once, however many requests wait for it,
    and kept while the cache has room.

    Args:
        load_vocabulary: reads the model's token table; called by a worker thread with the first
            constraint. After a ConfigurationError, it is not called again.
        backend: "xgrammar", "llguidance", or "auto", which is xgrammar for all that it can
            express and llguidance for the rest. `check_installed` must have accepted it.
        limits: bounds.
        metrics: counts the grammars; None discards them.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        *,
        backend: str = "auto",
        limits: CompileLimits = CompileLimits(),
        metrics: EngineMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        names = installed_backends() if backend == "auto" else (backend,)
        # What takes xgrammar too long is often quick in llguidance.
        is_double = backend == "auto" and "llguidance" in names
        self._choices = ("auto", "llguidance") if is_double else (backend,)
        self._limits = limits
        self._metrics = metrics or EngineMetrics()
        self._clock = clock
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, Constraint] = OrderedDict()
        self._num_cached_bytes = 0
        self._refusals: OrderedDict[bytes, tuple[float, BatonError]] = OrderedDict()
        self._pending: dict[bytes, list[Future[Constraint]]] = {}  # one future per call
        self._waiting = FairQueue[_Waiting]()
        self._process = CompileProcess(self._loaded_vocabulary, names)
        self._workers = ThreadPoolExecutor(limits.num_workers, thread_name_prefix="grammar")
        self._load_vocabulary = load_vocabulary
        self._load_lock = threading.Lock()
        self._vocabulary: Vocabulary | FailedPreconditionError | None = None
        self._backends: dict[str, Backend] = {}
        self._is_closed = False

    def compile(self, outputs: StructuredOutputs, owner: str = "") -> "Future[Constraint]":
        """Returns the constraint's future; done already if it is cached.

        Args:
            outputs: the constraint.
            owner: who needs it. Owners take turns, so that the many grammars of one do not delay
                those of another, and take its place if too many wait.

        A grammar whose futures are all cancelled before it begins to compile is not compiled. The
        exception of a future is an InvalidArgumentError that names the field if the constraint is
        malformed, unsupported, too large or too slow, a ResourceExhaustedError if too many
        grammars wait, a FailedPreconditionError if the model's token table cannot be loaded, an
        UnavailableError if the compile process does not start or after `close`, or an
        InternalError for a bug.
        """
        key, future, is_known = outputs.key, Future[Constraint](), False
        displaced: _Waiting | None = None
        with self._lock:
            if (pending := self._pending.get(key)) is not None:
                pending.append(future)
                is_known = True
            elif self._is_closed:
                future.set_exception(UnavailableError("the worker is stopping"))
            elif (cached := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                future.set_result(cached)
                is_known = True
            elif (refusal := self._known_refusal(key)) is not None:
                future.set_exception(refusal)
                is_known = True
            elif (
                len(self._pending) >= self._limits.max_waiting
                and (displaced := self._waiting.make_room(owner)) is None
            ):
                future.set_exception(self._too_many())
            else:
                self._pending[key] = [future]
                self._waiting.add(owner, (key, outputs))
                self._workers.submit(self._compile_next)
        if displaced is not None:
            self._end(displaced[0], self._too_many())
        self._metrics.grammar_looked_up(found=is_known)
        return future

    def _too_many(self) -> ResourceExhaustedError:
        limit = self._limits.max_waiting
        return ResourceExhaustedError(
            f"{limit} grammars wait to be compiled; try again later",
            _RETRY_AFTER_S,
            reason=Reason.REPLICAS_FULL,
        )

    def close(self) -> None:
        """Ends the compile process; pending futures fail. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._process.close()
        self._workers.shutdown(wait=True)

    def _compile_next(self) -> None:
        """Runs in a worker thread; the futures always end."""
        with self._lock:
            if (waiting := self._waiting.take()) is None:
                return  # another owner's grammar took the place of this one
            key, outputs = waiting
            if all(future.cancelled() for future in self._pending[key]):
                del self._pending[key]
                return
        start, result = self._clock(), self._compiled(outputs)
        self._metrics.grammar_compiled(self._clock() - start, _name_outcome(result))
        self._end(key, result)

    def _compiled(self, outputs: StructuredOutputs) -> Constraint | BatonError:
        """Returns the constraint, or the error of its futures."""
        try:
            return self._compile_in_process(outputs)
        except BatonError as error:
            return error
        except BaseException:
            _logger.exception("compiling a grammar failed")
            return InternalError("the grammar could not be compiled")

    def _compile_in_process(self, outputs: StructuredOutputs) -> Constraint:
        """Compiles with each choice of backend in turn until one has neither run out of time
        nor of memory; together they have the time of one grammar. If all have, or if one refuses
        a grammar with schemas that are hints, it compiles without these, at first without the
        large ones.
        """
        vocabulary = self._loaded_vocabulary()
        field = outputs.client_field
        timeout_s = self._limits.timeout_s / len(self._choices)
        problem = ""
        tries: list[tuple[str, int | None, float]]
        tries = [(choice, None, timeout_s) for choice in self._choices]
        has_hints = any(part.is_hint for part in outputs.parts)
        if has_hints:
            sizes = (_LARGE_HINT_CHARS, 0)
            tries += [(self._choices[0], num_chars, timeout_s / 4) for num_chars in sizes]
        for choice, max_hint_chars, limit_s in tries:
            try:
                report, data = self._run_job(outputs, choice, max_hint_chars, limit_s)
            except JobTimeoutError:
                problem = f"took more than {self._limits.timeout_s:g} s to compile"
            except JobLostError:
                problem = "needs too much memory, or nests too deeply, to compile"
            except InvalidArgumentError:
                if not has_hints or max_hint_chars == 0:
                    raise
                problem = "is too complex"  # perhaps for its hints
            else:
                grammar = self._loaded_backend(report["backend"], vocabulary).load(data)
                return Constraint(grammar, vocabulary, field, marks_of(outputs, vocabulary))
        raise InvalidArgumentError(f"{field} {problem}; simplify it")

    def _run_job(
        self, outputs: StructuredOutputs, choice: str, max_hint_chars: int | None, timeout_s: float
    ) -> tuple[dict[str, str], bytes]:
        """Returns the compile process's report on a grammar, and the compiled grammar."""
        job = {
            "outputs": asdict(outputs),
            "backend": choice,
            "max_hint_chars": max_hint_chars,
            "timeout_s": timeout_s,
            "memory_bytes": self._limits.memory_bytes,
            "max_whitespace": self._limits.max_whitespace,
        }
        answer = self._process.run_job(json.dumps(job).encode(), timeout_s)
        header, _, data = answer.partition(b"\n")
        report = json.loads(header)
        if "error" in report:
            raise InvalidArgumentError(report["error"])
        if "bug" in report:
            raise RuntimeError(report["bug"])
        return report, data

    def _loaded_vocabulary(self) -> Vocabulary:
        """Returns the model's token table; the first call loads it.

        Raises:
            FailedPreconditionError: the table cannot be loaded.
        """
        with self._load_lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._load_vocabulary()
                except ConfigurationError as error:
                    self._vocabulary = FailedPreconditionError(str(error))
            if isinstance(self._vocabulary, FailedPreconditionError):
                raise self._vocabulary.with_traceback(None)
            return self._vocabulary

    def _loaded_backend(self, name: str, vocabulary: Vocabulary) -> Backend:
        """Returns a backend of this process; the first call loads it."""
        with self._load_lock:
            if name not in self._backends:
                self._backends[name] = load_backend(name, vocabulary)
            return self._backends[name]

    def _end(self, key: bytes, result: Constraint | BatonError) -> None:
        with self._lock:
            futures = self._pending.pop(key)
            if isinstance(result, Constraint):
                self._keep(key, result)
            elif isinstance(result, InvalidArgumentError):
                self._refusals[key] = (self._clock() + self._limits.refusal_s, result)
                while len(self._refusals) > self._limits.max_waiting:
                    self._refusals.popitem(last=False)
        for future in futures:  # callbacks run here, without the lock
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(result, Constraint):
                future.set_result(result)
            else:
                future.set_exception(result)

    def _keep(self, key: bytes, constraint: Constraint) -> None:
        """Caches a grammar; drops those that were used the longest ago."""
        self._cache[key] = constraint
        self._num_cached_bytes += constraint.grammar.num_bytes
        while self._num_cached_bytes > self._limits.cache_bytes and self._cache:
            _, dropped = self._cache.popitem(last=False)
            self._num_cached_bytes -= dropped.grammar.num_bytes

    def _known_refusal(self, key: bytes) -> BatonError | None:
        until, error = self._refusals.get(key, (0.0, None))
        if error is not None and until <= self._clock():
            del self._refusals[key]
            return None
        return error


def marks_of(outputs: StructuredOutputs, vocabulary: Vocabulary) -> dict[int, bytes]:
    """Returns the special tokens that a structural tag names: models write calls with them."""
    if outputs.structural_tag is None:
        return {}
    texts = set(texts_of_tag(json.loads(str(outputs.structural_tag))))
    return {
        token_id: name.encode()
        for token_id, name in vocabulary.special_tokens.items()
        if token_id not in vocabulary.eos_token_ids and any(name in text for text in texts)
    }


def _name_outcome(result: Constraint | BatonError) -> Literal["compiled", "refused", "failed"]:
    if isinstance(result, Constraint):
        return "compiled"
    return "refused" if isinstance(result, InvalidArgumentError) else "failed"
