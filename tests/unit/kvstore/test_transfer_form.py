"""`TransferForm` and `BlockSlicing`: namespaces, object keys, object ids, byte runs, refusals."""

from dataclasses import replace

import pytest
import torch

from baton.common.errors import ConfigurationError
from kvstore.block_key import BlockKeyChain, derive_namespace
from kvstore.layout import KvLayout, KvShape, StateLayout, StatePart
from kvstore.mover.pool_objects import open_pool
from kvstore.transfer_form import BlockSlicing, PoolShare, TransferForm, object_runs

LAYOUT = KvLayout(num_layers=2, num_kv_heads=4, block_size=16, head_dim=6, dtype="bfloat16")
STATES = StateLayout(6, (StatePart("conv", 12, 30, "bfloat16"), StatePart("sum", 8, 16, "float32")))


def test_the_namespace_is_made_of_the_form_and_the_model() -> None:
    form = TransferForm(16, "bfloat16")
    assert form.namespace(b"model") == derive_namespace(
        model_fingerprint=b"model", kv_dtype="bfloat16", layout_version=1, block_size=16
    )
    others = [TransferForm(8, "bfloat16"), TransferForm(16, "float16")]
    others += [TransferForm(16, "bfloat16", heads) for heads in (2, 4)]
    others += [TransferForm(16, "bfloat16", heads, layers) for heads in (1, 2) for layers in (2, 4)]
    namespaces = {each.namespace(model) for each in (form, *others) for model in (b"a", b"b")}
    assert len(namespaces) == 18


def test_a_form_is_described_in_words() -> None:
    fingerprint = bytes.fromhex("3fa2b1c4d5e6f708")
    assert TransferForm(16, "bfloat16").describe(fingerprint) == (
        "model 3fa2b1c4d5e6, bfloat16, 16 tokens per block, layout 1, keys 1, objects 1, handoffs 1"
    )
    assert "8 tokens per block, 2 head slices" in TransferForm(8, "fp8_e4m3", 2).describe(b"m")
    assert "block, 2 layer slices, layout 1" in TransferForm(8, "fp8_e4m3", 1, 2).describe(b"m")


def test_states_are_part_of_the_namespace_but_not_how_their_slots_are_cut() -> None:
    form = TransferForm(16, "bfloat16")
    others = [
        replace(STATES, num_layers=5),
        replace(STATES, parts=STATES.parts[:1]),
        replace(STATES, parts=(replace(STATES.parts[0], dtype="float16"), STATES.parts[1])),
    ]
    forms = [form, *(replace(form, states=states) for states in (STATES, *others))]
    assert len({each.namespace(b"m") for each in forms}) == 5
    sliced = replace(form, states=STATES.sliced(2, 4, 100))
    assert sliced.namespace(b"m") == forms[1].namespace(b"m")
    assert (
        forms[1]
        .describe(b"m")
        .endswith(
            "handoffs 1, 6 states of conv [12, 30] bfloat16, sum [8, 16] float32, state layout 1"
        )
    )


def test_a_slot_is_cut_into_whole_objects_slice_by_slice() -> None:
    """A slice has 3 layers of 6 x 30 x 2 bytes, filled up to 368, and 4 x 16 x 4 bytes."""
    form = TransferForm(8, "bfloat16", 2, 2, STATES)
    slicing = BlockSlicing(LAYOUT, form, PoolShare(num_blocks=5))
    object_bytes = 2 * 2 * 8 * 6 * 2
    assert slicing.object_layout.block_bytes == object_bytes == 384
    assert slicing.slots == STATES.sliced(2, 2, object_bytes)
    units = -(-3 * (368 + 256) // object_bytes)
    assert slicing.slots.units == units == 5
    assert slicing.slots.slot_bytes == 4 * units * object_bytes
    assert slicing.slots.state_bytes == STATES.state_bytes == 6 * (720 + 512)
    first, num_blocks = 5 * 2 * 4, 5 * 2
    assert slicing.first_state_object == first
    assert slicing.object_ids([9]) == (36, 37, 38, 39)
    assert slicing.object_ids([num_blocks]) == (first, first + 5, first + 10, first + 15)
    slot = range(num_blocks + 2 * units, num_blocks + 3 * units)
    assert sorted(slicing.object_ids(slot)) == list(range(first + 40, first + 60))
    runs = [object_runs(slicing, number) for number in slicing.object_ids([slot[1]])]
    assert runs == [(5, (((40 + index * 5 + 1) * 384, 384),)) for index in range(4)]


def test_shares_of_states_are_cut_into_the_slices_of_the_whole() -> None:
    form = TransferForm(16, "bfloat16", 2, 2, STATES)
    whole = BlockSlicing(LAYOUT, form).slots
    assert whole is not None
    parts = [
        BlockSlicing(share.layout_of(LAYOUT), form, share).slots
        for share in (PoolShare(1, 2), PoolShare(stage=1, num_stages=2), PoolShare(1, 2, 0, 2))
    ]
    assert [part.slot_bytes * n for part, n in zip(parts, (2, 2, 4), strict=True) if part] == [
        whole.slot_bytes
    ] * 3
    assert all(part is not None and part.units == whole.units for part in parts)


def test_states_of_objects_of_another_data_type_have_byte_runs() -> None:
    form = TransferForm(16, "float32", states=STATES)
    slicing = BlockSlicing(LAYOUT, form, PoolShare(num_blocks=3))
    assert object_runs(slicing, 2) is None
    assert object_runs(slicing, 4) == (3, ((LAYOUT.block_bytes * 2, LAYOUT.block_bytes * 2),))


def test_blocks_are_not_sliced_without_a_form() -> None:
    slicing = BlockSlicing.of(LAYOUT)
    assert slicing.is_native
    assert slicing.object_layout == LAYOUT
    assert slicing.object_keys([b"a", b"b"]) == (b"a", b"b")
    assert slicing.object_ids([5, 3]) == (5, 3)


def test_a_share_of_the_heads_is_one_slice() -> None:
    first, second = (BlockSlicing.of(LAYOUT, share=PoolShare(rank, 2)) for rank in (0, 1))
    assert first.is_native
    assert second.is_native
    assert first.form == second.form == TransferForm(16, "bfloat16", 2)
    keys = {*first.object_keys([b"a"]), *second.object_keys([b"a"])}
    assert len(keys) == 2
    assert second.object_ids([7]) == (7,)


def test_the_keys_of_all_shares_are_those_of_the_whole_model() -> None:
    form = TransferForm(16, "bfloat16", 4)
    keys = [b"a", b"b", b"c"]
    whole = BlockSlicing(LAYOUT, form)
    half = KvLayout(2, 2, 16, 6, "bfloat16")
    parts = [BlockSlicing(half, form, PoolShare(rank, 2)) for rank in (0, 1)]
    assert whole.object_layout == parts[0].object_layout == parts[1].object_layout
    assert len(set(whole.object_keys(keys))) == 12
    for index in range(len(keys)):
        (key,) = (keys[index],)
        both = [*parts[0].object_keys([key]), *parts[1].object_keys([key])]
        assert both == list(whole.object_keys([key]))
    assert whole.object_ids([2, 0]) == (8, 9, 10, 11, 0, 1, 2, 3)
    assert parts[1].object_ids([2, 0]) == (4, 5, 0, 1)


def test_slices_of_layers_are_numbered_before_those_of_heads() -> None:
    form = TransferForm(16, "bfloat16", num_head_slices=2, num_layer_slices=2)
    whole = BlockSlicing(LAYOUT, form)
    assert whole.objects_per_block == 4
    half = KvLayout(2, 2, 16, 6, "bfloat16")
    parts = [BlockSlicing(half, form, PoolShare(rank, 2)) for rank in (0, 1)]
    assert all(part.is_native for part in parts)
    assert whole.object_layout == parts[0].object_layout == KvLayout(1, 2, 16, 6, "bfloat16")
    first, second, third, fourth = whole.object_keys([b"a"])
    assert parts[0].object_keys([b"a"]) == (first, third)
    assert parts[1].object_keys([b"a"]) == (second, fourth)
    assert parts[1].object_ids([5]) == (10, 11)


def test_layer_slices_of_a_block_are_in_order() -> None:
    slicing = BlockSlicing(LAYOUT, TransferForm(16, "bfloat16", num_layer_slices=2))
    assert slicing.is_native
    half = LAYOUT.block_bytes // 2
    assert object_runs(slicing, 6) == (3, ((0, half),))
    assert object_runs(slicing, 7) == (3, ((half, half),))


@pytest.mark.parametrize(
    ("form", "share", "message"),
    [
        (TransferForm(12, "bfloat16"), PoolShare(), "--kv-transfer-block-size is 12"),
        (TransferForm(32, "bfloat16"), PoolShare(), "divisor of --block-size 16"),
        (TransferForm(0, "bfloat16"), PoolShare(), "--kv-transfer-block-size is 0"),
        (TransferForm(16, "bfloat16", 3), PoolShare(), "divisor of the model's 4 KV heads"),
        (TransferForm(16, "bfloat16", 16), PoolShare(0, 2), "divisor of the model's 8 KV heads"),
        (TransferForm(16, "bfloat16", 1), PoolShare(1, 2), "multiple of the 2 ranks"),
        (TransferForm(16, "bfloat16", 1, 3), PoolShare(), "layer-slices is 3.*2 layers of a block"),
        (TransferForm(16, "bfloat16", 1, 0), PoolShare(), "--kv-transfer-layer-slices is 0"),
        (TransferForm(1, "fp8_e4m3"), PoolShare(), "multiple of 2 for fp8_e4m3"),
        (
            TransferForm(
                16, "bfloat16", 4, 1, replace(STATES, parts=(StatePart("conv", 6, 1, "float32"),))
            ),
            PoolShare(),
            "head-slices is 4; it must be a divisor of the 6 heads of the states' conv",
        ),
        (
            TransferForm(16, "bfloat16", 1, 2, replace(STATES, num_layers=3)),
            PoolShare(),
            "layer-slices is 2; it must be a divisor of the 3 recurrent layers",
        ),
    ],
)
def test_impossible_slices_are_refused(form: TransferForm, share: PoolShare, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BlockSlicing(LAYOUT, form, share)


def test_a_whole_block_is_one_run() -> None:
    assert object_runs(BlockSlicing.of(LAYOUT), 5) == (5, ((0, LAYOUT.block_bytes),))
    narrow = KvLayout(2, 4, 16, 6, "fp8_e4m3")
    assert object_runs(BlockSlicing.of(narrow), 2) == (2, ((0, narrow.block_bytes),))


def test_a_block_of_latent_vectors_has_one_part_and_one_head() -> None:
    latent = KvLayout(3, 1, 16, 576, "bfloat16", num_parts=1)
    assert latent.block_shape == (3, 1, 1, 16, 576)
    assert latent.block_bytes == 3 * 16 * 576 * 2
    slicing = BlockSlicing(latent, TransferForm(4, "bfloat16", 1, 3))
    layer, size = 16 * 576 * 2, 4 * 576 * 2
    # Objects are numbered by transfer block, then by layer.
    assert object_runs(slicing, 4) == (0, ((layer + size, size),))
    assert slicing.max_runs == 1
    for rank in range(4):  # all ranks have all of it
        assert PoolShare.of(rank, 4, latent.num_kv_heads) == PoolShare()
    with pytest.raises(ConfigurationError, match=r"head-slices is 2.*the model's only KV head"):
        BlockSlicing(latent, TransferForm(16, "bfloat16", 2))


def test_objects_of_another_data_type_have_no_byte_runs() -> None:
    assert object_runs(BlockSlicing(LAYOUT, TransferForm(16, "float16")), 0) is None


def test_a_head_slice_is_one_run_per_layer_for_keys_and_for_values() -> None:
    slicing = BlockSlicing(LAYOUT, TransferForm(16, "bfloat16", 2))
    half = 2 * 16 * 6 * 2
    expected = tuple((half * index, half) for index in (1, 3, 5, 7))
    assert object_runs(slicing, 7) == (3, expected)


def test_pool_keys_are_every_nth_of_a_chain() -> None:
    tokens = list(range(50))
    chain = BlockKeyChain(b"n", 4, blocks_per_pool_block=3)
    plain = BlockKeyChain(b"n", 4)
    for end in (3, 11, 12, 13, 35, 36, 50):
        keys = plain.extend(tokens[:end])
        assert list(chain.extend_pool(tokens[:end])) == list(keys[2::3])
        assert list(chain.keys) == list(keys)
    other = chain.copy()
    other.extend(list(range(60)))
    assert len(chain.pool_keys) == 4
    assert len(other.pool_keys) == 5
    assert list(other.pool_keys) == list(other.keys[2::3])


def test_keys_and_pool_keys_are_one_list_without_transfer_blocks() -> None:
    chain = BlockKeyChain(b"n", 4)
    chain.extend(list(range(9)))
    assert chain.pool_keys is chain.keys
    other = chain.copy()
    other.extend(list(range(20)))
    assert other.pool_keys is other.keys
    assert len(chain.keys) == 2


SHAPES = (KvShape(4, 8, num_layers=4), KvShape(2, 32, num_layers=2))
SHAPED = KvLayout(4, 4, 16, 8, "bfloat16", group_shapes=SHAPES)


@pytest.mark.parametrize(
    ("share", "num_slices"), [(PoolShare(), (1, 1)), (PoolShare(1, 2), (2, 2))]
)
def test_blocks_of_several_shapes_are_moved_as_they_are(
    share: PoolShare, num_slices: tuple[int, int]
) -> None:
    layout = share.layout_of(SHAPED)
    assert [layout.of_group(group).block_bytes for group in (0, 1)] == [layout.block_bytes] * 2
    slicing = BlockSlicing(layout, TransferForm(16, "bfloat16", *num_slices), share)
    assert slicing.is_native
    part = slicing.object_layout
    assert [part.of_group(group).block_bytes for group in (0, 1)] == [part.block_bytes] * 2


@pytest.mark.parametrize(
    ("form", "flag"),
    [
        (TransferForm(8, "bfloat16"), "--kv-transfer-block-size is 8; it must be 16, as the"),
        (TransferForm(16, "float16"), "--kv-transfer-dtype is float16; it must be bfloat16, as"),
        (TransferForm(16, "bfloat16", 1, 4), "-layer-slices is 4; .* of the 2 layers"),
    ],
)
def test_blocks_of_several_shapes_are_not_converted(form: TransferForm, flag: str) -> None:
    with pytest.raises(ConfigurationError, match=flag):
        BlockSlicing(SHAPED, form)


def test_heads_of_several_shapes_are_not_cut_differently() -> None:
    slicing = BlockSlicing(SHAPED, TransferForm(16, "bfloat16", 2))
    with pytest.raises(
        ConfigurationError, match="--kv-transfer-head-slices is 2; it must be the 1"
    ):
        open_pool(torch.zeros(2, *SHAPED.block_shape, dtype=torch.bfloat16), slicing)
