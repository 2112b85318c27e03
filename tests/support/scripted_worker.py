"""`python -m tests.support.scripted_worker`: a small process for tests of the supervisor.

Announces its pid, then lives as it is told:

    serve       until SIGTERM, upon which it says so and exits 0
    stubborn    until SIGKILL; SIGTERM is only announced
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
