"""The rules by which byte-level BPE splits a text into words, by their names in GGUF files.

The rules are those of the published `tokenizer.json` files of the models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenizers import Regex, pre_tokenizers

from baton.common.errors import ConfigurationError
from baton.common.model_files.gguf.header import GgufHeader

__all__ = ["WordRule", "word_rule"]

_KEY = "tokenizer.ggml.pre"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Words that end where a lower-case letter is followed by an upper-case one.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*",
)
_CASED_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WordRule:
    """A rule that splits a text into words.

    Attributes:
        patterns: regular expressions; each splits the parts that the earlier ones leave.
        takes_whole_words: whether a word that is a token is taken without merges that build it.
        is_normalized: whether texts are normalized to NFC.
        adds_bos: whether a text begins with the BOS token, if the file does not say.
    """

    patterns: tuple[str, ...]
    takes_whole_words: bool = False
    is_normalized: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> Any:
        """Returns the steps that split a text and convert words to byte-level characters."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


def word_rule(header: GgufHeader) -> WordRule:
    """Returns the rule that a file names.

    Raises:
        ConfigurationError: the rule is not supported; names the key.
    """
    name = header.metadata.get(_KEY, "default")
    rule = _RULES.get(_ALIASES.get(name, name))
    if rule is None:
        raise _unknown(header, name)
    return rule


def _unknown(header: GgufHeader, name: Any) -> ConfigurationError:
    known = ", ".join([*_RULES, *_ALIASES])
    return header.refuse(f"{_KEY} {name!r} is not supported; supported are {known}")


_RULES: Mapping[str, WordRule] = MappingProxyType(
    {
        # Of files older than the key.
        "default": WordRule(
            patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
        ),
        "gpt-2": WordRule(patterns=(_GPT2,)),
        "olmo": WordRule(patterns=(_GPT2,), is_normalized=True),
        "smollm": WordRule(patterns=(r"\p{N}", _GPT2)),
        "llama-bpe": WordRule(patterns=(_LLAMA3,), takes_whole_words=True, adds_bos=True),
        "dbrx": WordRule(patterns=(_LLAMA3,)),
        "qwen2": WordRule(
            patterns=(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), is_normalized=True
        ),
        "tekken": WordRule(
            patterns=(rf"{'|'.join(_CASED)}|\p{{N}}|{_CASED_REST}",),
            takes_whole_words=True,
            adds_bos=True,
        ),
        "gpt-4o": WordRule(
            patterns=(
                rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?"
                rf"|\p{{N}}{{1,3}}|{_CASED_REST}",
            )
        ),
        "deepseek-v3": WordRule(
            patterns=(
                r"\p{N}{1,3}",
                "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
                rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
                rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
            )
        ),
    }
)
# Other names of the same rule.
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "llama3": "llama-bpe",
        "llama-v3": "llama-bpe",
        "smaug-bpe": "llama-bpe",
        "lfm2": "llama-bpe",
        "glm4": "dbrx",
        "chatglm-bpe": "dbrx",
        "deepseek-r1-qwen": "qwen2",
        "starcoder": "smollm",
        "refact": "smollm",
        "command-r": "smollm",
        "llama4": "gpt-4o",
    }
)
