"""A clock that a test moves."""


class Clock:
    """Returns `now`, in seconds, when it is called."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
