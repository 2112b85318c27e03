"""`Place`: one request in a `Backlog`, and its times. Pure."""

from router.fleet.fair_shares import Share

__all__ = ["Place"]


class Place:
    """One request in a backlog.

    Args:
        num_ahead: how many requests were there before it that are as urgent.
        entered_at: when it came.
        priority: the request's.
        share: what it takes of its tenant's share.
        is_awaited: whether a client waits for the answer.

    Attributes:
        started_at: when it was started on a replica; None until then.
        has_first_token: whether the first token has come.
        begun_at: when decode sent its first output; None until then.
        grammar: the key of its structured outputs, empty without any.
        num_tokens: those that it has, of one candidate.
        send_wait_s: how long it waited for its client to take them.
    """

    def __init__(
        self,
        num_ahead: float,
        entered_at: float,
        priority: int,
        share: Share,
        *,
        is_awaited: bool,
    ) -> None:
        self.num_ahead = num_ahead
        self.entered_at = entered_at
        self.priority = priority
        self.share = share
        self.is_awaited = is_awaited
        self.started_at: float | None = None
        self.has_first_token = False
        self.begun_at: float | None = None
        self.grammar = b""
        self.num_tokens = 0.0
        self.send_wait_s = 0.0
