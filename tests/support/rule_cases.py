"""Logit rules of all kinds, tables that hold them, and an oracle in float64."""

import math
import random
from collections import Counter
from dataclasses import dataclass, fields

import torch

from engine.draw_params import LogitRules
from kernels import RuleTable, reference

__all__ = ["GARBAGE", "RuleCase", "expected_logits", "make_rules", "random_rules"]

GARBAGE = 0x7EADBEEF  # no token of any vocabulary


def expected_logits(logits, rules, tokens):
    """Returns the logits of one sequence after its rules, in float64.

    Args:
        logits: `[vocab]` numbers.
        rules: `LogitRules`.
        tokens: the sequence's tokens, prompt included.
    """
    values = [float(value) for value in logits]
    for token, bias in rules.bias:
        values[token] += bias
    for token in set(tokens):
        penalty = rules.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, count in Counter(tokens[rules.num_prompt :]).items():
        values[token] -= rules.presence_penalty + rules.frequency_penalty * count
    for token in _banned(rules, tuple(tokens), len(values)):
        values[token] = -math.inf
    return torch.tensor(values, dtype=torch.float64)


def _banned(rules, tokens, vocab_size):
    banned = set()
    if rules.allowed is not None:
        banned |= set(range(vocab_size)) - set(rules.allowed)
    if len(tokens) < rules.min_length:
        banned |= set(rules.stop_token_ids)
    for word in rules.bad_words:
        before = word[:-1]
        if tokens[len(tokens) - len(before) :] == before:
            banned.add(word[-1])
    return banned


def random_rules(vocab_size, tokens, num_prompt, seed):
    """Returns rules of which each is on with some probability."""
    rng = random.Random(seed)

    def some(make, off):
        return make() if rng.random() < 0.5 else off

    def ids(count):
        return tuple(rng.sample(range(vocab_size), min(count, vocab_size)))

    def bad_word():
        length = rng.randint(1, 5)
        before = rng.choice([tuple(tokens[len(tokens) - length + 1 :]), ids(length - 1)])
        return (*before, rng.randrange(vocab_size))

    return LogitRules(
        num_prompt=num_prompt,
        repetition_penalty=some(lambda: rng.choice([0.5, 1.3, 2.0]), 1.0),
        presence_penalty=some(lambda: rng.uniform(-2, 2), 0.0),
        frequency_penalty=some(lambda: rng.uniform(-2, 2), 0.0),
        bias=some(lambda: tuple((t, rng.uniform(-100, 100)) for t in ids(rng.randint(1, 9))), ()),
        allowed=some(lambda: ids(rng.randint(1, vocab_size)), None),
        bad_words=some(lambda: tuple(bad_word() for _ in range(rng.randint(1, 6))), ()),
        min_length=some(lambda: len(tokens) + rng.randint(-1, 1), 0),
        stop_token_ids=ids(rng.randint(0, 3)),
    )


def make_rules(vocab_size, sequences):
    """Returns a table with a row for each (rules, tokens), whose other contents are garbage.

    The last token is missing: `apply_logit_rules` adds it.
    """
    width = max((len(tokens) for _, tokens in sequences), default=0) + 3
    num_biases, num_stops, num_words = (
        max((len(getattr(rules, name)) for rules, _ in sequences), default=0)
        for name in ("bias", "stop_token_ids", "bad_words")
    )
    word_len = max((len(word) for rules, _ in sequences for word in rules.bad_words), default=0)
    count, num_masks = len(sequences), -(-vocab_size // 32)
    table = RuleTable(
        history=torch.full((count, width), GARBAGE, dtype=torch.int32),
        lengths=torch.zeros(count, 2, dtype=torch.int64),
        penalties=torch.zeros(count, 3),
        bias_ids=torch.full((count, num_biases), -1, dtype=torch.int32),
        biases=torch.full((count, num_biases), math.nan),
        stop_ids=torch.full((count, num_stops), -1, dtype=torch.int32),
        bad_words=torch.full((count, num_words, word_len), -1, dtype=torch.int32),
        allowed=torch.full((count, num_masks), -1, dtype=torch.int32),
    )
    for row, (rules, tokens) in enumerate(sequences):
        _fill(table, row, rules, tokens[:-1])
    return table


def _fill(table, row, rules, tokens):
    table.history[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    table.lengths[row] = torch.tensor([rules.num_prompt, rules.min_length])
    table.penalties[row] = torch.tensor(
        [rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty]
    )
    for index, (token, bias) in enumerate(rules.bias):
        table.bias_ids[row, index], table.biases[row, index] = token, bias
    for index, token in enumerate(rules.stop_token_ids):
        table.stop_ids[row, index] = token
    for index, word in enumerate(rules.bad_words):
        table.bad_words[row, index, table.bad_words.shape[2] - len(word) :] = torch.tensor(word)
    if rules.allowed is not None:
        words = [0] * table.allowed.shape[1]
        for token in rules.allowed:
            words[token // 32] |= 1 << (token % 32)
        signed = [word - 2**32 if word >= 2**31 else word for word in words]
        table.allowed[row] = torch.tensor(signed)


@dataclass(frozen=True)
class RuleCase:
    """Rows of logits and the rules of some of them.

    Attributes:
        logits: `[rows, vocab]` float32.
        sequences: (rules, tokens) of each sequence.
        rows: per sequence, its row of the logits.
        ids: per sequence, its row of the table.
    """

    logits: torch.Tensor
    sequences: list
    rows: list
    ids: list

    @classmethod
    def make(cls, vocab_size, num_rows, num_sequences, seed=0, max_len=40):
        """Returns a case with random rules; other rows of logits have no rules."""
        rng = random.Random(seed)
        sequences = []
        for index in range(num_sequences):
            tokens = [rng.randrange(vocab_size) for _ in range(rng.randint(1, max_len))]
            num_prompt = rng.randint(1, len(tokens))
            rules = random_rules(vocab_size, tokens, num_prompt, seed * 1000 + index)
            sequences.append((rules, tokens))
        logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
        rows = rng.sample(range(num_rows), num_sequences)
        ids = rng.sample(range(num_sequences), num_sequences)
        return cls(logits * 3, sequences, rows, ids)

    def apply(self, module, device="cpu"):
        """Applies the rules with `module` on `device`, inside of memory full of NaN.

        Returns:
            The logits, maxima and likeliest tokens, and the table's histories, on the CPU.
        """
        num_rows, vocab_size = self.logits.shape
        whole = torch.full((num_rows + 2, vocab_size + 5), math.nan, device=device)
        logits = whole[1:-1, :vocab_size]
        logits.copy_(self.logits)
        maxima, likeliest = (tensor.to(device) for tensor in reference.row_maxima(self.logits))
        by_id = [None] * len(self.ids)
        for place, sequence in zip(self.ids, self.sequences, strict=True):
            by_id[place] = sequence
        table = make_rules(vocab_size, by_id)
        table = RuleTable(*(getattr(table, field.name).to(device) for field in fields(table)))

        def vector(values):
            return torch.tensor(values, dtype=torch.int64, device=device)

        module.apply_logit_rules(
            logits,
            maxima,
            likeliest,
            table,
            rule_ids=vector(self.ids),
            tokens=vector([tokens[-1] for _, tokens in self.sequences]),
            positions=vector([len(tokens) for _, tokens in self.sequences]),
            logit_rows=vector(self.rows),
        )
        assert whole[0].isnan().all()
        assert whole[-1].isnan().all()
        assert whole[:, vocab_size:].isnan().all()
        return tuple(tensor.cpu() for tensor in (logits, maxima, likeliest, table.history))

    def check(self, module, device="cpu"):
        """Applies the rules and compares everything with the oracle."""
        logits, maxima, likeliest, history = self.apply(module, device)
        plain = [row for row in range(len(self.logits)) if row not in self.rows]
        assert torch.equal(logits[plain], self.logits[plain])
        for (rules, tokens), row, place in zip(self.sequences, self.rows, self.ids, strict=True):
            _check_row(logits[row], self.logits[row], rules, tokens)
            assert history[place, : len(tokens)].tolist() == tokens
            assert (history[place, len(tokens) :] == GARBAGE).all()
        expected_maxima, expected_likeliest = reference.row_maxima(logits)
        torch.testing.assert_close(maxima, expected_maxima, rtol=0, atol=0, equal_nan=True)
        expected = expected_likeliest.where(expected_likeliest >= 0, -2)
        assert torch.equal(likeliest, expected)


def _check_row(changed, logits, rules, tokens):
    """Each of four operations rounds to float32, and the penalty scales the errors before it."""
    expected = expected_logits(logits, rules, tokens)
    is_banned = expected == -math.inf
    assert torch.equal(changed == -math.inf, is_banned)
    penalty = max(rules.repetition_penalty, 1 / rules.repetition_penalty)
    others = abs(rules.presence_penalty) + abs(rules.frequency_penalty) * len(tokens)
    largest = (logits.double().abs() + 100) * penalty + others
    error = (changed.double() - expected).masked_fill(is_banned, 0.0).abs()
    assert (error <= 4 * torch.finfo(torch.float32).eps * largest).all()
