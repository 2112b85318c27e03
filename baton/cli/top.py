"""`baton top`: a router and its replicas, in the terminal."""

import argparse
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import grpc

from baton.cli.operator_calls import CALL_TIMEOUT_S, Operator, add_operator_args, calling_router
from baton.cli.terminal import has_colors
from baton.cli.top_view import Line, Sample, Style, render
from baton.common.errors import ConfigurationError, DeadlineExceededError, UnavailableError
from baton.v1 import cluster_pb2
from rpc.errors import from_rpc_error

__all__ = ["add_args", "main"]

_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.2, 3600.0
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_COLORS = {Style.PLAIN: "", Style.HEAD: "\x1b[1m", Style.BAD: "\x1b[31m"}
_PLAIN = "\x1b[0m"


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="time between two looks, over which rates are measured (default: %(default)s)",
    )
    parser.add_argument(
        "--once", action="store_true", help="look twice, print one table, and leave"
    )
    add_operator_args(parser)


def main(args: argparse.Namespace) -> int:
    """Shows what a router and its replicas do, until Ctrl-C.

    Without a terminal, each look prints a table. A router that does not answer is asked again.
    """
    if not _MIN_INTERVAL_S <= args.interval <= _MAX_INTERVAL_S:
        raise ConfigurationError(
            f"--interval is {args.interval}; it must be in [{_MIN_INTERVAL_S}, "
            f"{_MAX_INTERVAL_S:.0f}]"
        )
    with calling_router(args) as router:
        if args.once:
            _print_once(router, args)
        else:
            _follow(router, args)
    return 0


def _print_once(router: Operator, args: argparse.Namespace) -> None:
    before = _look(router)
    time.sleep(args.interval)
    width = shutil.get_terminal_size().columns
    _print(render(args.address, before, _look(router), width=width))


def _follow(router: Operator, args: argparse.Namespace) -> None:
    screen = _Screen(args.address)
    try:
        with screen.shown():
            while True:
                next_at = time.monotonic() + args.interval
                screen.take(router)
                screen.draw_until(next_at)
    except KeyboardInterrupt:
        pass


def _look(router: Operator) -> Sample:
    """Asks the router.

    Raises:
        BatonError: it did not answer, or refused.
    """
    try:
        cluster = router.stub.GetCluster(
            cluster_pb2.GetClusterRequest(), timeout=CALL_TIMEOUT_S, metadata=router.metadata
        )
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    return Sample(time.monotonic(), cluster)


def _print(lines: list[Line]) -> None:
    print(*(line.text for line in lines), sep="\n", flush=True)


class _Screen:
    """The last two looks, and the terminal that shows them.

    Args:
        address: the router's.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._before: Sample | None = None
        self._now: Sample | None = None
        self._problem = ""
        self._resized = threading.Event()
        self._is_terminal = sys.stdout.isatty()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Uses the terminal's other screen while the context lasts."""
        if not self._is_terminal:
            yield
            return
        earlier = signal.signal(signal.SIGWINCH, lambda *_: self._resized.set())
        sys.stdout.write(_ENTER)
        try:
            yield
        finally:
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()
            signal.signal(signal.SIGWINCH, earlier)

    def take(self, router: Operator) -> None:
        """Looks at the cluster; keeps the last look if the router does not answer.

        Raises:
            BatonError: the router refuses.
        """
        try:
            now = _look(router)
        except (UnavailableError, DeadlineExceededError) as error:
            self._problem = error.message
        else:
            self._before, self._now, self._problem = self._now, now, ""

    def draw_until(self, moment: float) -> None:
        """Draws the screen, again whenever its size changes, until a moment."""
        for number in count():
            if self._is_terminal or number == 0:
                self._draw()
            self._resized.clear()
            if not self._resized.wait(max(0.0, moment - time.monotonic())):
                return

    def _draw(self) -> None:
        width, height = shutil.get_terminal_size()
        lines = render(
            self._address,
            self._before,
            self._now,
            width=width,
            height=height if self._is_terminal else None,
            problem=self._problem,
        )
        if not self._is_terminal:
            _print([*lines, Line("")])
            return
        painted = f"{_END_OF_LINE}\n".join(map(_painted, lines))
        sys.stdout.write(f"{_HOME}{painted}{_END_OF_LINE}{_END_OF_SCREEN}")
        sys.stdout.flush()


def _painted(line: Line) -> str:
    color = _COLORS[line.style] if has_colors(sys.stdout) else ""
    return f"{color}{line.text}{_PLAIN}" if color else line.text
