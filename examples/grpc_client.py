"""Baton's own client, over gRPC: a stream, a chat, several prompts, the model.

    baton serve                                       # or `make run`, in another terminal
    python examples/grpc_client.py [ADDRESS]

The demo model writes text of the right form that makes little sense.
"""

import sys

from baton import Client, SamplingParams


def main(address: str = "127.0.0.1:50051") -> None:
    """Asks in each way and prints the answers."""
    params = SamplingParams(max_tokens=16, seed=1)
    with Client(address) as client:
        print("model:", client.get_model().name)
        print("stream: ", end="")
        for chunk in client.stream("Open the file", params):
            print(repr(chunk.text), end=" ", flush=True)
        print()
        for result in client.generate(["Open the file", "Return a list"], params):
            print("completion:", repr(result.text), f"({result.timings.total_ms:.0f} ms)")
        answer = client.chat([{"role": "user", "content": "How do I open a file?"}], params)
        print("chat:", repr(answer.text))


if __name__ == "__main__":
    main(*sys.argv[1:])
