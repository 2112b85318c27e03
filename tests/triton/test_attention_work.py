"""The list of work that gives every program of Triton's attention the same number of tiles."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.paged_kv import AttentionMetadata
from kernels.triton import attention
from kernels.triton.attention_plan import AttentionSizes, plan_passes
from kernels.triton.attention_work import SharedWork
from kernels.triton.launch import Rows, load_launch_table, replaced_launch_table
from tests.support.devices import DEVICE
from tests.support.triton_attention import attend, check, make_case

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HOPPER = load_launch_table("NVIDIA H200")
GROUP_SIZE, HEAD_DIM, NUM_PROCESSORS = 4, 128, 8
NO_WINDOW = (1 << 31) - 1


@dataclass
class Plan:
    """A list for a step of sequences of (query length, context)."""

    spans: list[tuple[int, int]]
    num_kv_heads: int = 8
    window: int = NO_WINDOW
    num_processors: int = NUM_PROCESSORS
    min_tokens: int = 64

    def __post_init__(self):
        lengths, contexts = zip(*self.spans, strict=True)
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        meta = AttentionMetadata(
            block_tables=torch.zeros((len(lengths), 1), dtype=torch.int32, device=DEVICE),
            query_starts=starts.to(DEVICE),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
            slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64, device=DEVICE),
            max_query_len=max(lengths),
            max_context_len=max(contexts),
        )
        decode = HOPPER.decode_attention.for_size(2 * HEAD_DIM)
        sizes = AttentionSizes(
            num_tokens=sum(lengths),
            num_seqs=len(lengths),
            max_query_len=max(lengths),
            max_context_len=max(contexts),
            num_kv_heads=self.num_kv_heads,
            group_size=GROUP_SIZE,
            value_dim=HEAD_DIM,
            num_processors=self.num_processors,
        )
        decode = replace(decode, min_tokens_per_split=self.min_tokens)
        prefill = HOPPER.prefill_attention.for_size(2 * HEAD_DIM)
        self.part = plan_passes(sizes, decode, prefill)[0]
        output = torch.empty((1, 1, HEAD_DIM), device=DEVICE)
        work = SharedWork.for_pass(self.part, meta, self.window, GROUP_SIZE, output)
        assert SharedWork.for_pass(self.part, meta, self.window, GROUP_SIZE, output).words is (
            work.words
        )  # the next layer's
        self.words = work.words.tolist()

    def num_tiles(self, length, context):
        """The tiles of a sequence, in plain Python; 0 if the pass leaves it to another one."""
        if not self.part.min_rows <= length * GROUP_SIZE <= self.part.max_rows:
            return 0
        low = max(0, context - length - self.window + 1)
        block = self.part.block_n
        return max(1, -(-(context - low // block * block) // block))

    def attended(self):
        """Yields (program, KV head, sequence, tile) as the programs find them in the list."""
        total, num_contexts, share = self.words[:3]
        firsts = self.words[4 : 4 + self.part.num_programs]
        starts = self.words[4 + self.part.num_programs :]
        sequences = starts[len(self.spans) + 1 :]
        for program, first in enumerate(firsts):
            context = first
            place, end = program * share, min((program + 1) * share, total * self.num_kv_heads)
            while place < end:
                head, rank = divmod(context, num_contexts)
                context_place = head * total + starts[rank]
                context_end = head * total + starts[rank + 1]
                assert context_place <= place < context_end
                for tile in range(place, min(context_end, end)):
                    yield program, head, sequences[rank], tile - context_place
                place, context = context_end, context + 1


SPAN = st.tuples(st.integers(0, 20), st.integers(0, 3000)).map(lambda s: (s[0], s[0] + s[1]))


@settings(max_examples=8, deadline=None)
@given(
    spans=st.lists(SPAN, min_size=1, max_size=40).filter(lambda spans: any(s[0] for s in spans)),
    num_kv_heads=st.integers(1, 5),
    num_processors=st.integers(1, 5),
    window=st.integers(1, 1000) | st.just(NO_WINDOW),
    min_tokens=st.sampled_from([1, 64, 500]),
)
def test_every_tile_is_attended_once_and_no_program_has_more_than_its_share(spans, **options):
    # One token, so that the first pass is the one of short queries.
    plan = Plan([(1, 5), *spans], **options)
    attended = list(plan.attended())
    expected = {
        (head, sequence, tile)
        for head in range(plan.num_kv_heads)
        for sequence, span in enumerate(plan.spans)
        for tile in range(plan.num_tiles(*span))
    }
    assert len(attended) == len(expected)
    assert {(head, sequence, tile) for _, head, sequence, tile in attended} == expected
    share = max(-(-len(expected) // plan.part.num_programs), -(-plan.min_tokens // 64))
    counts = [0] * plan.part.num_programs
    for program, *_ in attended:
        counts[program] += 1
    assert max(counts) <= share


@pytest.mark.parametrize(
    ("contexts", "num_programs"),
    [([16_384] + [512] * 15, 16), ([512] * 31 + [8192], 8), ([16_384], 24)],
)
def test_one_long_context_among_short_ones_is_read_by_many_programs(contexts, num_programs):
    plan = Plan([(1, context) for context in contexts], num_kv_heads=1)
    long = contexts.index(max(contexts))
    readers = {program for program, _, sequence, _ in plan.attended() if sequence == long}
    assert len(readers) >= num_programs
    # No program reads much more than the mean, where one used to read a whole context.
    mean = plan.words[0] * plan.num_kv_heads / plan.part.num_programs
    assert plan.words[2] < mean + 1


@pytest.mark.parametrize("num_seqs", [4, 16])
def test_even_contexts_leave_no_program_idle_in_a_second_wave(num_seqs):
    plan = Plan([(1, 4096)] * num_seqs, num_kv_heads=1)
    total, _, share = plan.words[:3]
    assert plan.part.num_programs == 3 * NUM_PROCESSORS
    assert total * plan.num_kv_heads / (share * plan.part.num_programs) > 0.9


def test_sequences_beyond_those_that_a_program_looks_at_together():
    plan = Plan([(1, 200)] * 700 + [(0, 9)] * 400 + [(1, 5000)], num_kv_heads=1, num_processors=2)
    attended = list(plan.attended())
    assert len(attended) == 700 * 4 + 79
    assert {sequence for _, _, sequence, _ in attended} == {*range(700), 1100}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("num_processors", [1, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_long_context_among_short_ones(num_processors, dtype, monkeypatch):
    monkeypatch.setattr(attention, "_num_processors", lambda _: num_processors)
    spans = [(20, 1), (0, 1), (1500, 1), (63, 1), (64, 1)]
    case = make_case(spans, num_heads=6, num_kv_heads=2, dtype=dtype, has_sinks=True)
    check(case)
    check(case, 100)


@pytest.mark.slow
def test_prompts_are_left_to_another_pass():
    case = make_case([(20, 1), (10, 70), (300, 2), (0, 1)], dtype=torch.bfloat16)
    check(case)
    check(replace(case, meta=replace(case.meta, max_context_len=100_000)))


@pytest.mark.parametrize("spans", [[(700, 1), (130, 1), (3, 1)], [(650, 3), (40, 3)]])
@pytest.mark.parametrize("options", [{}, {"soft_cap": 5.0, "has_sinks": True}])
def test_a_table_may_turn_the_list_off(spans, options, monkeypatch):
    case = make_case(spans, dtype=torch.float32, **options)
    shared = attend(case, 500)
    table = load_launch_table("cpu")
    rows = tuple(replace(row, shares_evenly=0) for row in table.decode_attention.rows)
    monkeypatch.setattr(attention, "_attend_shares", None)
    with replaced_launch_table(replace(table, decode_attention=Rows(rows))):
        divided = check(case, 500)
    torch.testing.assert_close(shared, divided, atol=1e-6, rtol=1e-5)
    expected = case.attend(500, module=reference)
    torch.testing.assert_close(shared.cpu(), expected, atol=2e-6, rtol=2e-5)
