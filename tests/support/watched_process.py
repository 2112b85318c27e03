"""`python -m tests.support.watched_process LIMIT_S`: an event loop with a watchdog.

It prints "running" while the loop runs, and does what a line of standard input says: "lock" holds
Python's global lock for a long time, "block" keeps the event loop alone, "end" ends in order.
"""

import asyncio
import ctypes
import sys
import threading
import time

from rpc.watchdog import ending_when_stuck

LONG_S = 100


def hold_global_lock() -> None:
    ctypes.PyDLL(None).sleep(LONG_S)


async def main(limit_s: float) -> None:
    async with ending_when_stuck(limit_s):
        reading = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
        while not reading.done():
            print("running", flush=True)
            await asyncio.sleep(0.05)
        if reading.result() == "lock\n":
            threading.Thread(target=hold_global_lock, daemon=True).start()
            await asyncio.sleep(LONG_S)
        if reading.result() == "block\n":
            time.sleep(LONG_S)  # noqa: ASYNC251 - what the test is about


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
