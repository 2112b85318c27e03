"""Trains heads that draft the next tokens of a served model from its hidden states.

    python scripts/train_draft_heads.py --method eagle3 --output FOLDER
    python scripts/train_draft_heads.py --method medusa --model CHECKPOINT_FOLDER --output FOLDER

Writes a checkpoint folder: the head's configuration and float32 weights, and a model card that
records the versions, the corpus digest, the loss curve and how many draft tokens are accepted.

The served model is a Hugging Face checkpoint of Llama's shape; without `--model` it is the bundled
demo model. It stays as it is: the head learns its distribution of the next tokens. The texts
are the served model's own, half of them greedy and half drawn at temperature 1, after prompts from
the corpus of the demo model. In serving, the head sees only positions since generation began, but
the served model has seen the whole text; so in training the head's view begins anew at random
positions.

Training runs on one CPU thread; the same seed, steps, Python and torch on the same kind of
processor result in the same weights.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import tokenizers
import torch
import transformers
from demo_corpus import collect_corpus
from draft_acceptance import (
    NUM_PLACES,
    Continuations,
    continue_texts,
    measure_acceptance,
)
from draft_heads import DraftHead, Eagle, Eagle3, Medusa, ServedText, run_served
from safetensors.torch import save_file
from train_demo_model import (
    LICENCE_SECTION,
    Training,
    draw_windows,
    encode_documents,
    training_text_section,
)
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["main"]

_DEMO_MODEL = Path(__file__).parents[1] / "baton" / "demo_model"
_WINDOW_LENGTH = 256
_BATCH_SIZE = 2
# After 400 steps, EAGLE has 1.24 draft tokens in a row accepted; with windows of the corpus, 1.00.
_NUM_OWN_TEXTS = 1024
_TEXTS_PER_BATCH = 128
_PROMPT_LENGTHS = (4, 64)
_CUT_PROBABILITY = 1 / 64
_LATER_PLACE_WEIGHT = 0.8
_PEAK_LEARNING_RATE = 4e-3
_WARMUP_STEPS = 20
_HELD_OUT_PROMPT_LENGTH = 32
_MIN_CONTINUATION = 64
_CONTINUATION_LENGTH = 132

_CARD = """\
---
license: apache-2.0
language: en
---
# Draft heads for the {served}

They draft the next tokens that the served model will choose, from its hidden states.

- Method: {paper}.
- {num_parameters:,} parameters, stored in float32.
- Made by `scripts/train_draft_heads.py {flags}`.

{training_text}
The heads read {num_own_texts} texts of {window_length} tokens: prompts from this corpus, which the
served model continued, half of them greedily and half at temperature 1.

## Training
Step {step} of {steps}, each of {batch_size} x {window_length} tokens, AdamW, bfloat16 autocast,
one CPU thread; torch {torch}, transformers {transformers}, tokenizers {tokenizers}.
Loss is the cross-entropy with the served model's distribution in nats, summed over {num_places}
places, each weighted {later_weight} times the one before. The held-out loss is over greedy
continuations of held-out documents.

| step | training loss | held-out loss |
| ---: | ---: | ---: |
{curve}

## Accepted draft tokens
The served model continued {num_texts} held-out documents greedily, after {prompt_length} tokens
each, by up to {continuation_length} tokens. The heads drafted {num_places} tokens in each round. A
place's share counts the rounds in which all earlier places were right. The last column is the
mean number of right draft tokens in a row, without the token that the served model adds.

| the head sees | rounds | place 1 | place 2 | place 3 | place 4 | accepted |
| :--- | ---: | ---: | ---: | ---: | ---: | ---: |
{acceptance}

{licence}"""

_PAPERS = {
    "medusa": "Medusa (Cai et al. 2024, arXiv:2401.10774)",
    "eagle": "EAGLE (Li et al. 2024, arXiv:2401.15077)",
    "eagle3": "EAGLE-3 (Li et al. 2025, arXiv:2503.01840)",
}


def draw_own_texts(
    served: LlamaForCausalLM, train_ids: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Lets the served model continue prompts from `train_ids` [tokens]: [texts, _WINDOW_LENGTH]."""
    batches = []
    for batch in range(_NUM_OWN_TEXTS // _TEXTS_PER_BATCH):
        low, high = _PROMPT_LENGTHS
        length = int(torch.randint(low, high + 1, (), generator=generator))
        prompts = draw_windows(train_ids, _TEXTS_PER_BATCH, length, generator)
        greedy = batch % 2 == 0
        batches.append(continue_texts(served, prompts, _WINDOW_LENGTH - length, greedy=greedy))
    return torch.cat(batches)


def held_out_continuations(
    served: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, documents: list[str]
) -> Continuations:
    """Continues documents greedily.

    Leaves out documents shorter than a prompt, and continuations that end early.
    """
    encodings = tokenizer.backend_tokenizer.encode_batch(documents)
    length = _HELD_OUT_PROMPT_LENGTH
    prompts = [encoding.ids[:length] for encoding in encodings if len(encoding.ids) >= length]
    token_ids = continue_texts(served, torch.tensor(prompts), _CONTINUATION_LENGTH, greedy=True)
    texts = Continuations(token_ids, length, tokenizer.eos_token_id)
    is_long = [num_tokens >= length + _MIN_CONTINUATION for num_tokens in texts.lengths()]
    return replace(texts, token_ids=token_ids[torch.tensor(is_long)])


def draw_begins(token_ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Cuts texts at random; returns where each position's piece begins: [texts, tokens]."""
    is_cut = torch.rand(token_ids.shape, generator=generator) < _CUT_PROBABILITY
    return (is_cut * torch.arange(token_ids.shape[1])).cummax(1).values


def loss_of(head: DraftHead, text: ServedText) -> torch.Tensor:
    """Returns the weighted cross-entropies of all places with the served model's distribution.

    A draft vocabulary that lacks tokens is weighted by the probability of those it has.
    """
    targets = text.next_logits.float().softmax(-1)
    if len(head.vocabulary) < targets.shape[-1]:
        targets = targets[..., head.vocabulary]
    positions = torch.arange(text.begins.shape[1])
    loss = torch.zeros(())
    for place, logits in enumerate(head.draft(text, NUM_PLACES)):
        is_known = positions - text.begins >= place
        losses = -(targets * logits.float().log_softmax(-1)).sum(-1)
        loss = loss + _LATER_PLACE_WEIGHT**place * losses[is_known].mean()
    return loss


def loss_over(
    head: DraftHead, served: LlamaForCausalLM, token_ids: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Returns the loss over `token_ids` [texts, tokens], cut at random."""
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(head, run_served(served, token_ids, draw_begins(token_ids, generator)))


def start_training(
    head: DraftHead, served: LlamaForCausalLM, own_texts: torch.Tensor, held_out: torch.Tensor
) -> Training:
    """Prepares training on `own_texts` and evaluation on `held_out`, both [texts, tokens]."""

    def batch_loss(generator: torch.Generator) -> torch.Tensor:
        rows = torch.randint(0, len(own_texts), (_BATCH_SIZE,), generator=generator)
        return loss_over(head, served, own_texts[rows], generator)

    @torch.no_grad()
    def held_out_loss() -> float:
        return loss_over(head, served, held_out, torch.Generator().manual_seed(0)).item()

    return Training(
        head,
        batch_loss,
        held_out_loss,
        peak_learning_rate=_PEAK_LEARNING_RATE,
        num_warmup_steps=_WARMUP_STEPS,
    )


def frequent_tokens(token_ids: torch.Tensor, num_tokens: int, vocab_size: int) -> torch.Tensor:
    """Returns the most frequent of `token_ids` in ascending order: [num_tokens]."""
    counts = token_ids.flatten().bincount(minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:num_tokens].sort().values


def build_head(
    arguments: argparse.Namespace, served: LlamaForCausalLM, token_ids: torch.Tensor
) -> DraftHead:
    """Makes the untrained head; `token_ids` decide about EAGLE-3's draft vocabulary."""
    if arguments.method == "medusa":
        return Medusa(served, NUM_PLACES)
    if arguments.method == "eagle":
        return Eagle(served)
    vocab_size = served.config.vocab_size
    draft_vocab_size = arguments.draft_vocab_size or vocab_size // 2
    return Eagle3(served, frequent_tokens(token_ids, draft_vocab_size, vocab_size))


def write_checkpoint(folder: Path, head: DraftHead, card: str) -> None:
    """Writes the configuration, the weights and the card."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(head.config_fields(), indent=2, sort_keys=True)
    (folder / "config.json").write_text(config + "\n")
    save_file(head.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "MODEL_CARD.md").write_text(card)


def acceptance_rows(head: DraftHead, served: LlamaForCausalLM, texts: Continuations) -> str:
    """Returns the card's table of accepted draft tokens."""
    views = {"positions from the last prompt token on": False, "the whole text": True}
    if isinstance(head, Medusa):
        views = {"one position": False}
    rows = []
    for view, whole_text in views.items():
        acceptance = measure_acceptance(head, served, texts, whole_text=whole_text)
        rates = " | ".join(f"{rate:.3f}" for rate in acceptance.rates)
        rows.append(
            f"| {view} | {acceptance.num_rounds} | {rates} | {acceptance.mean_length:.3f} |"
        )
    return "\n".join(rows)


def flags_text(arguments: argparse.Namespace) -> str:
    """Returns the flags that decide about the weights."""
    flags = {"method": arguments.method, "steps": arguments.steps, "seed": arguments.seed}
    if arguments.model != _DEMO_MODEL:
        flags["model"] = arguments.model.name
    if arguments.draft_vocab_size is not None:
        flags["draft-vocab-size"] = arguments.draft_vocab_size
    return " ".join(f"--{name} {value}" for name, value in flags.items())


def model_card(
    head: DraftHead, training: Training, fields: dict[str, str], arguments: argparse.Namespace
) -> str:
    """Returns the model card of the run so far; `fields` are what only `main` knows."""
    return _CARD.format(
        served="Baton demo model" if arguments.model == _DEMO_MODEL else arguments.model.name,
        paper=_PAPERS[arguments.method],
        flags=flags_text(arguments),
        num_parameters=sum(parameter.numel() for parameter in head.parameters()),
        steps=arguments.steps,
        step=training.losses[-1][0],
        batch_size=_BATCH_SIZE,
        window_length=_WINDOW_LENGTH,
        num_own_texts=_NUM_OWN_TEXTS,
        num_places=NUM_PLACES,
        later_weight=_LATER_PLACE_WEIGHT,
        prompt_length=_HELD_OUT_PROMPT_LENGTH,
        continuation_length=_CONTINUATION_LENGTH,
        torch=torch.__version__,
        transformers=transformers.__version__,
        tokenizers=tokenizers.__version__,
        curve=training.curve(),
        licence=LICENCE_SECTION,
        **fields,
    )


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description="Train heads that draft the next tokens of a served model."
    )
    parser.add_argument("--method", choices=sorted(_PAPERS), required=True, help="kind of heads")
    parser.add_argument("--output", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument(
        "--model", type=Path, default=_DEMO_MODEL, help="folder of the served model (%(default)s)"
    )
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        help="most frequent tokens that eagle3 can draft (half of the vocabulary)",
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
    served = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    served.eval().requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.model)
    corpus = collect_corpus()
    train_ids = encode_documents(tokenizer, corpus.training)
    num_tokens = len(train_ids) + len(encode_documents(tokenizer, corpus.held_out))
    own_texts = draw_own_texts(served, train_ids, torch.Generator().manual_seed(arguments.seed))
    held_out = held_out_continuations(served, tokenizer, corpus.held_out)
    head = build_head(arguments, served, own_texts)
    training = start_training(head, served, own_texts, held_out.token_ids)
    training_text = training_text_section(corpus, num_tokens)
    num_texts = str(len(held_out.token_ids))
    for _ in training.run(arguments.steps, arguments.seed):
        acceptance = acceptance_rows(head, served, held_out)
        fields = {"training_text": training_text, "acceptance": acceptance, "num_texts": num_texts}
        print(acceptance, flush=True)
        write_checkpoint(arguments.output, head, model_card(head, training, fields, arguments))


if __name__ == "__main__":
    main()
