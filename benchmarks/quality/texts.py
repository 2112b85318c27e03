"""Texts that every Python installation has, as tokens of a model."""

from pydoc_data.topics import topics

import tokenizers

from baton.common.errors import ConfigurationError

__all__ = ["token_texts"]


def token_texts(
    tokenizer: tokenizers.Tokenizer, num_texts: int, num_tokens: int
) -> list[list[int]]:
    """Returns the beginnings of Python's help topics, which are written for people to read.

    Args:
        tokenizer: the model's, which also adds the tokens that begin a text.
        num_texts: number of texts.
        num_tokens: tokens of each. Shorter topics are left out.

    Raises:
        ConfigurationError: there are fewer such texts.
    """
    encoded = (tokenizer.encode(text).ids for _, text in sorted(topics.items()))
    texts = [ids[:num_tokens] for ids in encoded if len(ids) >= num_tokens]
    if len(texts) < num_texts:
        raise ConfigurationError(
            f"--num-texts is {num_texts}; Python has {len(texts)} help topics of {num_tokens} "
            "tokens or more"
        )
    return texts[:num_texts]
