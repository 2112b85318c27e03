"""What a rank holds is what docs/parallelism.md says."""

import pytest
import torch

from baton.common.errors import ConfigurationError
from engine.kv_cache.spec import group_layers
from engine.models.config_fields import ConfigFields
from engine.models.part import ModelPart
from engine.models.registry import family_of
from kvstore.layout import KvLayout
from kvstore.transfer_form import BlockSlicing, PoolShare, TransferForm
from tests.support.rank_hosts import group_of

LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER, VOCAB = 24, 16, 8, 64, 1024, 2816, 32_000
SHAPE = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("width", "num_stages"), [(1, 2), (2, 2), (3, 4), (8, 1)])
def test_weights_are_those_of_the_formula(width: int, num_stages: int, tied: bool) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6} if width == 3 else {}
    shape = SHAPE | heads | {"head_dim": HEAD_DIM, "tie_word_embeddings": tied}
    family = family_of("LlamaForCausalLM")
    config = family.read_config(ConfigFields(shape, "llama"))
    attention = 2 * WIDTH * HEAD_DIM * (config.num_heads + config.num_kv_heads)
    layer, table = attention + 3 * WIDTH * INNER, VOCAB * WIDTH
    for stage in range(num_stages):
        is_first, is_last = stage == 0, stage == num_stages - 1
        num_tables = int(is_first or is_last) if tied else is_first + is_last
        expected = LAYERS * layer / (width * num_stages) + num_tables * table / width
        for rank in range(width):
            group = group_of(rank, width) if width > 1 else None
            with torch.device("meta"):
                model = family.build(config, ModelPart(group, stage, num_stages))
            assert model.num_weights() == pytest.approx(expected, rel=0.05)


def test_stages_must_have_equally_many_layers() -> None:
    with pytest.raises(ConfigurationError, match="-size is 2; it must divide the model's 3 layers"):
        ModelPart(stage=0, num_stages=2).layers(3)
    message = "-size is 2; its stages need equally many layers of each sliding window"
    with pytest.raises(ConfigurationError, match=message):
        group_layers((None, None, 8, 8)).slots_of(0, 2)
    alternating = group_layers((None, 8, None, 8))
    assert [alternating.slots_of(stage, 2) for stage in range(2)] == [((0, 0), (1, 0))] * 2


def test_stages_need_slices_of_their_own() -> None:
    stage = KvLayout(LAYERS // 2, KV_HEADS, 16, HEAD_DIM, "bfloat16")
    message = "--kv-transfer-layer-slices is 1; it must be a multiple of the 2 stages"
    with pytest.raises(ConfigurationError, match=message):
        BlockSlicing(stage, TransferForm(16, "bfloat16"), PoolShare(stage=1, num_stages=2))


@pytest.mark.parametrize(("width", "num_stages"), [(1, 2), (2, 3), (16, 1), (16, 4)])
def test_kv_is_that_of_the_formula(width: int, num_stages: int) -> None:
    whole = KvLayout(LAYERS, KV_HEADS, 16, HEAD_DIM, "bfloat16")
    share = PoolShare.of(width - 1, width, KV_HEADS, num_stages - 1, num_stages)
    expected = whole.block_bytes / (min(width, KV_HEADS) * num_stages)
    assert share.layout_of(whole).block_bytes == expected
