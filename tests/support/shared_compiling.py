"""One compile process for the engines of many tests: the start of each imports torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from engine.constraints import compiler
from engine.constraints.compile_process import CompileProcess
from engine.constraints.vocabulary import Vocabulary

__all__ = ["SharedCompileProcesses"]

_Key = tuple[str, ...]  # of a process: its vocabulary and backends


class SharedCompileProcesses:
    """Compile processes that run until `close`, one for each vocabulary and choice of backends."""

    def __init__(self) -> None:
        self._processes: dict[_Key, CompileProcess] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, compilers use these processes. `close` of a compiler ends one only while it does
        a job of that compiler.
        """
        processes = self._processes

        class Shared:
            """Takes the place of one compiler's `CompileProcess`."""

            def __init__(
                self, get_vocabulary: Callable[[], Vocabulary], backends: Sequence[str]
            ) -> None:
                self._get_vocabulary, self._backends = get_vocabulary, tuple(backends)
                self._running: list[_Key] = []

            def run_job(self, job: bytes, timeout_s: float) -> bytes:
                vocabulary = self._get_vocabulary()
                key = (vocabulary.to_json(), *self._backends)
                process = CompileProcess(lambda: vocabulary, self._backends)
                self._running.append(key)
                try:
                    return processes.setdefault(key, process).run_job(job, timeout_s)
                finally:
                    self._running.remove(key)

            def close(self) -> None:
                for key in set(self._running):
                    processes.pop(key).close()

        with mock.patch.object(compiler, "CompileProcess", Shared):
            yield

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes.values():
            process.close()
