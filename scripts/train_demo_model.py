"""Trains the bundled demo model on the Python standard library's docstrings.

    python scripts/train_demo_model.py --output baton/demo_model
    python scripts/train_demo_model.py --shape draft --steps 600 --output FOLDER

The second command trains a draft model for it, with its tokenizer, in a few minutes.

Writes a Hugging Face checkpoint folder: a small Llama and its byte-level BPE tokenizer, with a
model card that records the versions, the corpus digest and the loss curve. Training runs on
one CPU thread; the same seed, steps, Python and torch on the same kind of processor result in
the same weights.

`demo_corpus.py` collects the corpus from the Python installation.
"""

import argparse
import math
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import tokenizers
import torch
import transformers
from demo_corpus import HELD_OUT_EVERY, Corpus, collect_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = [
    "LICENCE_SECTION",
    "Training",
    "draw_windows",
    "encode_documents",
    "main",
    "training_text_section",
]

_BOS, _EOS = "<s>", "</s>"
_CHAT_TEMPLATE = Path(__file__).parents[1] / "baton" / "demo_model" / "chat_template.jinja"
_VOCAB_SIZE = 2048
_MAX_POSITIONS = 1024
_SEQUENCE_LENGTH = 512
_BATCH_SIZE = 8
_PEAK_LEARNING_RATE = 3e-3
_WARMUP_STEPS = 100
_EVALUATE_EVERY = 200

_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
---
{purpose}

- Shape: {num_layers} layers, hidden size {hidden_size}, {num_heads} attention heads, \
{num_kv_heads} KV heads, vocabulary {vocab_size}, {num_parameters:,} parameters.
- Weights are stored in bfloat16 and meant to run in float32, as `config.json` says.
- Positions up to {max_positions}; trained on sequences of {sequence_length} tokens.
- Its chat template writes messages as paragraphs; the model was not trained on chats.
- Made by `scripts/train_demo_model.py {flags}--steps {steps} --seed {seed}`.

{training_text}
## Training
Step {step} of {steps}, each of {batch_size} x {sequence_length} tokens, AdamW, bfloat16 autocast,
one CPU thread; torch {torch}, transformers {transformers}, tokenizers {tokenizers}.
One document in {held_out_every} was held out. Loss is in nats per token.

| step | training loss | held-out loss |
| ---: | ---: | ---: |
{curve}

{licence}"""

_TRAINING_TEXT = """\
## Training text
Docstrings of the Python {python} standard library and the help topics of
`pydoc`: {num_documents:,} documents, {num_chars:,} characters, {num_tokens:,} tokens,
SHA-256 `{digest}`.
"""

LICENCE_SECTION = """\
## Licence
The weights are under the Apache License 2.0. The training text is part of
Python, Copyright (c) 2001 Python Software Foundation; All Rights Reserved,
used under the Python Software Foundation License Version 2
(https://docs.python.org/3/license.html).
"""

_PURPOSES = {
    "demo": """\
# Baton demo model

A small Llama that completes English text about Python, so that Baton runs
without a download. It is made for trying the software; its texts are often wrong.""",
    "draft": """\
# Draft model for the Baton demo model

A smaller Llama that drafts the next tokens of the demo model.""",
}
_SHAPES = {
    "demo": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "draft": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
}


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer that begins every text with the BOS token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=[_BOS, _EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A",
        pair=f"{_BOS} $A $B",
        special_tokens=[(_BOS, tokenizer.token_to_id(_BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BOS,
        eos_token=_EOS,
        model_max_length=_MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def encode_documents(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> torch.Tensor:
    """Encodes all documents one after another, each from BOS to EOS: [tokens]."""
    token_ids: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(documents):
        token_ids.extend([*encoding.ids, tokenizer.eos_token_id])
    return torch.tensor(token_ids)


def build_model(tokenizer: PreTrainedTokenizerFast, shape: str) -> LlamaForCausalLM:
    """Makes the untrained model."""
    config = LlamaConfig(
        **_SHAPES[shape],
        vocab_size=_VOCAB_SIZE,
        max_position_embeddings=_MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy of the next token over `token_ids` [sequences, tokens]."""
    with torch.autocast("cpu", torch.bfloat16):
        loss: torch.Tensor = model(input_ids=token_ids, labels=token_ids).loss
    return loss


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, token_ids: torch.Tensor) -> float:
    """Returns the mean loss over `token_ids` [tokens], cut into whole sequences."""
    num_sequences = len(token_ids) // _SEQUENCE_LENGTH
    sequences = token_ids[: num_sequences * _SEQUENCE_LENGTH].view(num_sequences, -1)
    losses = [loss_of(model, batch).item() * len(batch) for batch in sequences.split(_BATCH_SIZE)]
    return sum(losses) / num_sequences


def learning_rate_scale(step: int, num_steps: int, num_warmup_steps: int) -> float:
    """Returns the learning rate's factor: a linear warm-up, then a cosine to zero."""
    warmup = min(1.0, (step + 1) / num_warmup_steps)
    return warmup * 0.5 * (1 + math.cos(math.pi * step / num_steps))


def draw_windows(
    token_ids: torch.Tensor, num_windows: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Draws random windows of `token_ids` [tokens]: [num_windows, length]."""
    last_start = len(token_ids) - length
    starts = torch.randint(0, last_start + 1, (num_windows,), generator=generator)
    return torch.stack([token_ids[start : start + length] for start in starts])


class Training:
    """One training run; `run` yields after every step that should be saved.

    Args:
        model: is trained.
        batch_loss: draws a batch and returns its loss.
        held_out_loss: returns the loss that is recorded at each save point.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch_loss: Callable[[torch.Generator], torch.Tensor],
        held_out_loss: Callable[[], float],
        *,
        peak_learning_rate: float = _PEAK_LEARNING_RATE,
        num_warmup_steps: int = _WARMUP_STEPS,
    ) -> None:
        self.losses: list[tuple[int, float, float]] = []  # step, training, held out
        self._model = model
        self._batch_loss = batch_loss
        self._held_out_loss = held_out_loss
        self._num_warmup_steps = num_warmup_steps
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=peak_learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )

    def run(self, num_steps: int, seed: int) -> Iterator[int]:
        """Trains for `num_steps`; yields the step number at each save point."""
        generator = torch.Generator().manual_seed(seed)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer,
            lambda step: learning_rate_scale(step, num_steps, self._num_warmup_steps),
        )
        progress = tqdm(range(1, num_steps + 1), unit="step", mininterval=10)
        for step in progress:
            loss = self._step(generator)
            schedule.step()
            progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if step % _EVALUATE_EVERY == 0 or step == num_steps:
                self.losses.append((step, loss, self._held_out_loss()))
                yield step

    def curve(self) -> str:
        """Returns the losses as the rows of a table."""
        return "\n".join(f"| {i} | {train:.3f} | {held:.3f} |" for i, train, held in self.losses)

    def _step(self, generator: torch.Generator) -> float:
        loss = self._batch_loss(generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


def write_checkpoint(
    folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str
) -> None:
    """Writes a folder that `AutoModelForCausalLM` and `AutoTokenizer` can load."""
    stored = LlamaForCausalLM(model.config)
    stored.load_state_dict(model.state_dict())
    stored.to(torch.bfloat16).save_pretrained(folder)
    # bfloat16 halves the file. Running in float32 avoids ties in greedy decoding.
    stored.config.dtype = torch.float32
    stored.config.save_pretrained(folder)
    tokenizer.chat_template = _CHAT_TEMPLATE.read_text()
    tokenizer.save_pretrained(folder)
    (folder / "MODEL_CARD.md").write_text(card)


def training_text_section(corpus: Corpus, num_tokens: int) -> str:
    """Returns the section of a model card that describes the corpus."""
    documents = corpus.training + corpus.held_out
    return _TRAINING_TEXT.format(
        python=platform.python_version(),
        num_documents=len(documents),
        num_chars=sum(map(len, documents)),
        num_tokens=num_tokens,
        digest=corpus.digest,
    )


def model_card(
    model: LlamaForCausalLM, training: Training, training_text: str, arguments: argparse.Namespace
) -> str:
    """Returns the model card of the run so far."""
    config = model.config
    return _CARD.format(
        purpose=_PURPOSES[arguments.shape],
        flags="" if arguments.shape == "demo" else f"--shape {arguments.shape} ",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        num_parameters=model.num_parameters(),
        max_positions=_MAX_POSITIONS,
        sequence_length=_SEQUENCE_LENGTH,
        batch_size=_BATCH_SIZE,
        held_out_every=HELD_OUT_EVERY,
        step=training.losses[-1][0],
        steps=arguments.steps,
        seed=arguments.seed,
        torch=torch.__version__,
        transformers=transformers.__version__,
        tokenizers=tokenizers.__version__,
        training_text=training_text,
        curve=training.curve(),
        licence=LICENCE_SECTION,
    )


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description="Train the bundled demo model on the standard library's docstrings."
    )
    parser.add_argument("--output", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument(
        "--shape",
        choices=sorted(_SHAPES),
        default="demo",
        help="size of the model; a draft has the demo model's tokenizer (%(default)s)",
    )
    parser.add_argument("--steps", type=int, default=1500, help="training steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (%(default)s)")
    return parser.parse_args()


def main() -> None:
    """Trains, and writes the checkpoint at every evaluation and at the end."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(arguments.seed)
    corpus = collect_corpus()
    if arguments.shape == "demo":
        tokenizer = train_tokenizer(corpus.training)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(_CHAT_TEMPLATE.parent)
    train_ids = encode_documents(tokenizer, corpus.training)
    held_out_ids = encode_documents(tokenizer, corpus.held_out)
    model = build_model(tokenizer, arguments.shape)
    training = Training(
        model,
        lambda generator: loss_of(
            model, draw_windows(train_ids, _BATCH_SIZE, _SEQUENCE_LENGTH, generator)
        ),
        lambda: evaluate(model, held_out_ids),
    )
    training_text = training_text_section(corpus, len(train_ids) + len(held_out_ids))
    for _ in training.run(arguments.steps, arguments.seed):
        card = model_card(model, training, training_text, arguments)
        write_checkpoint(arguments.output, model, tokenizer, card)


if __name__ == "__main__":
    main()
