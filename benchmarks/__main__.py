"""`python -m benchmarks [split | scheduling]`: each prints tables and may write JSON.

split       two tiers against one engine, over gRPC (what runs if none is named)
scheduling  KV memory and the scheduler: waste, sharing, step times, block
            operations, what prefix caching costs
"""

import importlib
import sys

_COMMANDS = ("split", "scheduling")


def main() -> None:
    """Entry point of `make bench`."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    is_named = bool(arguments) and arguments[0] in _COMMANDS
    command = arguments.pop(0) if is_named else _COMMANDS[0]
    importlib.import_module(f"benchmarks.{command}_command").main(arguments)


if __name__ == "__main__":
    main()
