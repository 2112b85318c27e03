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
# Letters that have cases, and Chinese, Japanese and Korean characters, in DeepSeek's first rules.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Words of Kimi are in cases, but for Chinese ones.
_NOT_HAN = r"&&[^\p{Han}]"
_KIMI = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NOT_HAN}]*[{_LOWER}{_NOT_HAN}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NOT_HAN}]+[{_LOWER}{_NOT_HAN}]*",
)
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
        "qwen35": WordRule(
            patterns=(
                rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
            ),
            is_normalized=True,
        ),
        "seed-coder": WordRule(
            patterns=(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
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
        "kimi-k2": WordRule(
            patterns=(
                rf"\p{{Han}}+|{_KIMI[0]}{_CONTRACTIONS}?|{_KIMI[1]}{_CONTRACTIONS}?"
                rf"|\p{{N}}{{1,3}}|{_REST}",
            )
        ),
        "deepseek-llm": WordRule(
            patterns=(
                r"[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _ASIAN,
                r"\p{N}",
            )
        ),
        "deepseek-coder": WordRule(
            patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")
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
