"""`python -m tests.support.scripted_worker`: a small process for tests of the supervisor.

It prints its pid, then acts by its mode:

    serve       runs until SIGTERM, prints "terminated" and exits with status 0
    stubborn    runs until SIGKILL; prints "terminated" upon SIGTERM
    crash N     exits with status N
    orphan      prints the pid of a child that keeps its output open, and exits with status 0
    bar         draws a progress bar many times in one line, then serves
"""

import os
import signal
import subprocess
import sys


def main(mode: str, status: str = "0") -> None:
    print(f"pid {os.getpid()}", flush=True)
    if mode == "crash":
        sys.exit(int(status))
    if mode == "orphan":
        print(f"child {subprocess.Popen(['sleep', '100']).pid}", flush=True)
        sys.exit()
    if mode == "bar":
        for percent in range(100):
            sys.stdout.write(f"\r{percent} of 100")
            sys.stdout.flush()
        print("\r100 of 100")
    # A handler that prints could interrupt another print, which fails.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    print("ready", flush=True)
    is_ended = False
    while not is_ended:
        signal.sigwait({signal.SIGTERM})
        print("terminated", flush=True)
        is_ended = mode != "stubborn"


if __name__ == "__main__":
    main(*sys.argv[1:])
