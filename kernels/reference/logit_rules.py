"""Changes logits by the rules of their rows, in plain torch."""

import torch

from kernels.dispatch import kernel
from kernels.reference.pointwise import row_maxima
from kernels.row_state import NO_TOKEN, RuleTable

__all__ = ["apply_logit_rules"]

_PADDING = -1
_WORD_BITS = 32


@kernel("logits.device", "logits.dtype")
def apply_logit_rules(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    likeliest: torch.Tensor,
    rules: RuleTable,
    *,
    rule_ids: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    logit_rows: torch.Tensor,
) -> None:
    """Changes rows of logits, in place, by rules. Implementations do not wait for the device.

    In this order: biases are added; for each token of the sequence, positive logits are divided by
    the repetition penalty and others multiplied; from those of the output, the presence penalty and
    the frequency penalty times their count are subtracted; tokens that must not be drawn become
    -inf. Each step rounds to float32.

    Args:
        logits: `[rows, vocab]` float32; the rows `logit_rows` are changed.
        maxima: `[rows]` float32, from `row_maxima`; changed with the logits.
        likeliest: `[rows]` int64, from `row_maxima`; changed with the logits. It becomes `NO_TOKEN`
            if the changed row has no finite maximum. Rows in which it is negative stay as they are.
        rules: the rules. `tokens` are added to the histories.
        rule_ids: `[n]` int64, all different; the row of `rules` for each changed row.
        tokens: `[n]` int64; the last token of each sequence.
        positions: `[n]` int64, at least 1; the length of each sequence.
        logit_rows: `[n]` int64, all different; the rows to change.
    """
    rules.history[rule_ids, positions - 1] = tokens.to(torch.int32)
    values = logits.index_select(0, logit_rows)
    values = _add_biases(values, rules, rule_ids)
    values = _penalize(values, rules, rule_ids, positions)
    values = values.masked_fill(_banned(values, rules, rule_ids, positions), -torch.inf)
    largest, indices = row_maxima(values)
    indices = indices.where(indices >= 0, NO_TOKEN)
    is_valid = likeliest.index_select(0, logit_rows) >= 0
    changed = logit_rows[is_valid]
    logits[changed] = values[is_valid]
    maxima[changed], likeliest[changed] = largest[is_valid], indices[is_valid]


def _add_biases(values: torch.Tensor, rules: RuleTable, rule_ids: torch.Tensor) -> torch.Tensor:
    token_ids, biases = rules.bias_ids[rule_ids].long(), rules.biases[rule_ids]
    biases = biases.masked_fill(token_ids == _PADDING, 0.0)
    return values.scatter_add(1, token_ids.clamp(min=0), biases)


def _penalize(
    values: torch.Tensor, rules: RuleTable, rule_ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    repetition, presence, frequency = rules.penalties[rule_ids].unsqueeze(-1).unbind(1)  # [n, 1]
    counts, is_seen = _count_tokens(values.shape[-1], rules, rule_ids, positions)
    repeated = (values / repetition).where(values > 0, values * repetition)
    values = repeated.where(is_seen, values)
    # In float64 the product is exact, so that it makes no difference whether a device rounds it.
    penalty = presence.double() + frequency.double() * counts
    return (values.double() - penalty).float().where(counts > 0, values)


def _count_tokens(
    vocab_size: int, rules: RuleTable, rule_ids: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how often each token is in the output, and whether it is in prompt or output, both
    `[n, vocab]`.
    """
    longest = int(positions.max()) if len(positions) else 0
    places = torch.arange(longest, device=positions.device)
    is_known = places < positions.unsqueeze(-1)
    is_output = is_known & (places >= rules.lengths[rule_ids, :1])
    history = rules.history[rule_ids, :longest].long().where(is_known, 0)  # [n, longest]
    zeros = torch.zeros(len(rule_ids), vocab_size, dtype=torch.int32, device=positions.device)
    counts = zeros.scatter_add(1, history, is_output.int())
    return counts, zeros.scatter_add(1, history, is_known.int()) > 0


def _banned(
    values: torch.Tensor, rules: RuleTable, rule_ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Returns which tokens must not be drawn, `[n, vocab]` bool."""
    token_ids = torch.arange(values.shape[-1], device=values.device)
    words = rules.allowed[rule_ids][:, token_ids // _WORD_BITS]
    banned = (words >> (token_ids % _WORD_BITS).int()) & 1 == 0
    is_early = (positions < rules.lengths[rule_ids, 1]).unsqueeze(-1)
    stop_ids = rules.stop_ids[rule_ids].long()
    _ban(banned, stop_ids, is_early & (stop_ids != _PADDING))
    bad_words = rules.bad_words[rule_ids].long()  # [n, num_words, word_len]
    if bad_words.numel():
        before, last = bad_words[..., :-1], bad_words[..., -1]
        latest = _latest(rules, rule_ids, positions, before.shape[-1]).unsqueeze(1)
        follows = ((before == _PADDING) | (before == latest)).all(dim=-1)
        _ban(banned, last, follows & (last != _PADDING))
    return banned


def _ban(banned: torch.Tensor, token_ids: torch.Tensor, is_banned: torch.Tensor) -> None:
    """Sets `banned[i, token_ids[i, j]]` where `is_banned[i, j]`."""
    rows, entries = is_banned.nonzero(as_tuple=True)
    banned[rows, token_ids[rows, entries]] = True


def _latest(
    rules: RuleTable, rule_ids: torch.Tensor, positions: torch.Tensor, count: int
) -> torch.Tensor:
    """Returns the latest `count` tokens of each sequence, `[n, count]`; -2 before its start."""
    places = positions.unsqueeze(-1) + torch.arange(-count, 0, device=positions.device)
    latest = rules.history[rule_ids.unsqueeze(-1), places.clamp(min=0)]
    return latest.long().where(places >= 0, -2)
