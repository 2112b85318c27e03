"""`python -m tests.support.scripted_worker`: a small process for tests of the supervisor.

It prints its pid, then acts by its mode:

    serve       runs until SIGTERM, prints "terminated" and exits with status 0
    stubborn    runs until SIGKILL; prints "terminated" upon SIGTERM
    crash N     exits with status N
"""

import os
import signal
import sys
import threading


def main(mode: str, status: str = "0") -> None:
    print(f"pid {os.getpid()}", flush=True)
    if mode == "crash":
        sys.exit(int(status))
    stopped = threading.Event()

    def on_term(number, frame):
        print("terminated", flush=True)
        if mode == "serve":
            stopped.set()

    signal.signal(signal.SIGTERM, on_term)
    print("ready", flush=True)
    stopped.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
