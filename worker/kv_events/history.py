"""`MessageHistory`: the messages that subscribers may ask for again. Pure."""

from dataclasses import dataclass

__all__ = ["MessageHistory", "NumberedMessage"]


@dataclass(frozen=True, slots=True)
class NumberedMessage:
    """A published message.

    Attributes:
        number: counts the publisher's messages, from 0.
        payload: its last frame.
    """

    number: int
    payload: bytes

    @property
    def number_frame(self) -> bytes:
        """The frame of its number."""
        return self.number.to_bytes(8, "big")


class MessageHistory:
    """The messages from the last one on that said that no block is cached.

    They say by themselves what is cached now, so that a subscriber that asks for all of them needs
    nothing that came before.

    Args:
        max_keys: number of blocks named in them beyond which the publisher must start over; None
            keeps no message.
    """

    def __init__(self, max_keys: int | None) -> None:
        self._max_keys = max_keys
        self._messages: list[NumberedMessage] = []
        self._num_keys = 0
        self._next_number = 0

    @property
    def next_number(self) -> int:
        """Number of the next message."""
        return self._next_number

    @property
    def is_full(self) -> bool:
        """Whether the publisher must start over."""
        return self._max_keys is not None and self._num_keys > self._max_keys

    def add(self, payload: bytes, num_keys: int, *, starts_over: bool) -> NumberedMessage:
        """Numbers a message, and keeps it if any are kept.

        Args:
            payload: its last frame.
            num_keys: number of blocks that it names.
            starts_over: whether it begins with the news that no block is cached.
        """
        if starts_over:
            self._messages, self._num_keys = [], 0
        message = NumberedMessage(self._next_number, payload)
        self._next_number += 1
        if self._max_keys is not None:
            self._messages.append(message)
            self._num_keys += max(1, num_keys)
        return message

    def first_from(self, number: int) -> NumberedMessage | None:
        """Returns the first message that is kept with this number or a higher one; None if there
        is none.
        """
        if number >= self._next_number or not self._messages:
            return None
        return self._messages[max(0, number - self._messages[0].number)]
