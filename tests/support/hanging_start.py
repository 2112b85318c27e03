"""`python -m tests.support.hanging_start router|prefill|decode FLAGS...`: loading never ends."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

from baton.cli import main

LOADS = {
    "router": ("router.models", "RouterFiles.load"),
    "prefill": ("engine.loop.async_engine", "build_engine"),
    "decode": ("engine.loop.async_engine", "build_engine"),
}


def hang(*_):
    """Hangs as a download can: waits for threads that nothing can interrupt."""
    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(threading.Event().wait) for _ in range(2)]
        print("loading", flush=True)
        for wait in waits:
            wait.result()


if __name__ == "__main__":
    module, attribute = LOADS[sys.argv[1]]
    with mock.patch(f"{module}.{attribute}", hang):
        sys.exit(main(sys.argv[1:]))
