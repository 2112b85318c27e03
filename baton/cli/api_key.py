"""`baton api-key`: a new key for a client of the router."""

import argparse

from baton.common.security.tokens import hash_of_key, new_key

__all__ = ["add_args", "main"]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--name", default="NAME", help="name of the client in the file of --tenants"
    )


def main(args: argparse.Namespace) -> None:
    """Makes a key and prints it, once: nothing stores it. The file of the router's --tenants gets
    the printed entry, which has a hash of the key.
    """
    key = new_key()
    print(f"{key}\n\n- name: {args.name}\n  keys: [{hash_of_key(key)}]")
