"""Small vocabularies, and constraints compiled for them in this process."""

import json
from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.backends import load_backend
from engine.constraints.interface import Backend
from engine.constraints.matcher import Constraint
from engine.constraints.vocabulary import Vocabulary

BACKENDS = ("xgrammar", "llguidance")
KINDS = ("byte_level", "byte_fallback")

_CORPUS = [
    '{"name": "Anna", "age": 31, "tags": ["a", "b"], "next": null}',
    '{"value": -12.5, "kind": "foo", "größe": true, "x y": {"a": [1, 2, 3]}}',
    "The quick brown fox jumps over the lazy dog; naïve café, 日本語 and e\u0301.",
    '```json\n{\n  "name": "bar",\n  "value": false\n}\n```',
] * 4


@cache
def tokenizer_of(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer whose vocabulary has pieces of JSON; `</s>` ends a sequence."""
    return _byte_level() if kind == "byte_level" else _byte_fallback()


@cache
def vocabulary_of(kind: str) -> Vocabulary:
    """The token table of `tokenizer_of`, for a model with a few more logits than tokens."""
    backend = tokenizer_of(kind)
    eos = backend.token_to_id("</s>")
    return Vocabulary.of(
        backend, vocab_size=backend.get_vocab_size() + 5, eos_token_ids=[eos, 10**6]
    )


@cache
def backend_of(name: str, kind: str) -> Backend:
    """A backend with the token table of `tokenizer_of`."""
    return load_backend(name, vocabulary_of(kind))


def constraint_of(name: str, kind: str, **fields: object) -> Constraint:
    """Compiles `StructuredOutputs(**fields)`."""
    outputs = StructuredOutputs(**fields)
    backend = backend_of(name, kind)
    grammar = backend.load(backend.compile(outputs))
    return Constraint(grammar, vocabulary_of(kind), f"structured_outputs.{outputs.form}")


def new_matcher(name: str, kind: str, **fields: object):
    """A matcher of such a constraint that stops at the vocabulary's end."""
    return constraint_of(name, kind, **fields).new_matcher(vocabulary_of(kind).eos_token_ids)


def _byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # As GPT-4: words with one character before them, numbers, punctuation, spaces.
            pre_tokenizers.Split(
                tokenizers.Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"),
                behavior="isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def _byte_fallback() -> tokenizers.Tokenizer:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=160, limit_alphabet=60, show_progress=False)
    trained.train_from_iterator(_CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in model["vocab"] if token not in tokens]
    merges = [tuple(merge) for merge in model["merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer
