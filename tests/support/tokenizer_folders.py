"""Small tokenizers of the kinds that checkpoints have, written as checkpoint folders."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "def add(left, right):\n    return left + right\n",
    "Grüße aus Köln: naïve café, 日本語の文字 и русский текст.",
    "Emoji 😀😃 and family 👩‍👩‍👧; combining e\u0301 and n\u0303o.",
] * 3


def write_byte_level_folder(folder: Path) -> Path:
    """Byte-level BPE as in GPT-2 and Llama 3: `tokenizer.json` with a BOS template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool ü>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    return _write(folder, tokenizer, settings | {"eos_token": "</s>", "pad_token": "<pad>"})


def write_byte_fallback_folder(folder: Path) -> Path:
    """Metaspace BPE with byte fallback as in Llama 2: unknown characters become bytes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=150, limit_alphabet=60, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in model["vocab"] if token not in tokens]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "bos_token": "<s>"}
    return _write(folder, tokenizer, settings | {"eos_token": "</s>", "unk_token": "<unk>"})


def write_word_level_folder(folder: Path) -> Path:
    """Whole words without a decoder: texts have a space between any two tokens."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(
        special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool ü>", normalized=False)])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    return _write(folder, tokenizer, settings | {"eos_token": "</s>", "unk_token": "<unk>"})


def write_opt_folder(folder: Path) -> Path:
    """`vocab.json` and `merges.txt` as OPT has them: texts begin with `</s>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.model.save(str(folder))
    described = {"__type": "AddedToken", "content": "</s>", "normalized": True}
    flags = {"lstrip": False, "rstrip": False, "single_word": False}
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        "add_prefix_space": False,
        "pad_token": {**described, **flags, "content": "<pad>"},
        **{f"{role}_token": {**described, **flags} for role in ("bos", "eos", "unk")},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "</s>"}))
    return folder


def write_gpt2_folder(folder: Path) -> Path:
    """`vocab.json` and `merges.txt` only, with one token in `added_tokens.json`."""
    write_opt_folder(folder)
    (folder / "special_tokens_map.json").unlink()
    vocab = json.loads((folder / "vocab.json").read_text())
    vocab["<|endoftext|>"] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "added_tokens.json").write_text(json.dumps({"<image>": len(vocab)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": True}))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return folder


def _write(folder: Path, tokenizer: Tokenizer, settings: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"clean_up_tokenization_spaces": False, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
