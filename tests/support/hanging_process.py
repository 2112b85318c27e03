"""`python -m tests.support.hanging_process`: a process of a router that can hang.

It answers its parent, and blocks its event loop upon SIGUSR1.
"""

import asyncio
import signal
import time

from prometheus_client import CollectorRegistry

from router.processes.place import ProcessPlace
from router.processes.process_server import MetricsServicer, ProcessServer
from rpc.watchdog import end_on_signal

LONG_S = 100


async def main() -> None:
    end_on_signal()
    place, ended = ProcessPlace.from_environment(), asyncio.Event()
    assert place is not None
    server = ProcessServer(place.target, MetricsServicer(CollectorRegistry()))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, time.sleep, LONG_S)
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    await server.start()
    await ended.wait()
    await server.stop()


if __name__ == "__main__":
    asyncio.run(main())
