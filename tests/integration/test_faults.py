"""Every fault on several backends: loads report only right blocks, and all jobs end."""

import pytest
import torch

from kvstore.conformance.engines import NUM_BLOCKS, TinyEngine, random_prompt
from kvstore.faults import FAULTS
from kvstore.layout import KvLayout

_SMALL = KvLayout(num_layers=2, num_kv_heads=2, block_size=8, head_dim=16, dtype="float32")
_NUM_REFUSED = 10_000


@pytest.fixture
def open_engine():
    engines = []

    def open_one(url):
        engines.append(TinyEngine(url, _SMALL))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


def hand_over(publisher, reader, num_prompts=8, num_blocks=12):
    """Saves or lends the blocks of prompts and loads them; returns the outcomes."""
    outcomes = set()
    for index in range(num_prompts):
        keys, blocks = random_prompt(num_blocks), range(num_blocks)
        publisher.block_bytes[:] = torch.randint_like(publisher.block_bytes, 256)
        if not publisher.save(keys, blocks, lease_id=str(index)).committed:
            outcomes.add("not saved")
        result = reader.load(publisher.make_handoff(keys, str(index)), blocks)
        num_good = result.num_blocks
        assert torch.equal(reader.block_bytes[:num_good], publisher.block_bytes[:num_good])
        assert bool(result.error) == (num_good < num_blocks)
        outcomes.add(result.error)
        publisher.scheduler.end_lease(str(index))
    held = [job for job, saved in publisher.saves.items() if saved.is_held]
    publisher.run_until(lambda: sorted(publisher.released) == held, "release of all blocks")
    return outcomes


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["memory", "file", "grpc://"])
def test_no_fault_loads_wrong_bytes(open_engine, tmp_path, kind, fault):
    url = {"memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}/store"}.get(
        kind, kind
    )
    options = f"faults={fault}:0.2&fault_delay_s=0.02&fault_seed=5"
    faulty_url = f"faulty+{url}?{options}"
    outcomes = hand_over(open_engine(faulty_url), open_engine(faulty_url))
    if fault not in ("delay", "duplicate"):
        assert outcomes - {""}, "the fault did not occur"


@pytest.mark.parametrize("kind", ["memory", "grpc"])
def test_all_faults_at_once_load_no_wrong_bytes(open_engine, tmp_path, kind):
    faults = ",".join(f"{fault}:0.05" for fault in FAULTS)
    base = f"memory://{tmp_path.name}" if kind == "memory" else "grpc://"
    url = f"faulty+{base}?faults={faults}&fault_delay_s=0.02"
    hand_over(open_engine(url), open_engine(url), num_prompts=30)


@pytest.mark.timeout(300)
def test_none_of_ten_thousand_corrupt_objects_is_loaded(open_engine, tmp_path):
    store = f"memory://{tmp_path.name}"
    publisher = open_engine(store)
    reader = open_engine(f"faulty+{store}?faults=corrupt:0.7,truncate:0.7")
    num_refused = num_taken = 0
    while num_refused < _NUM_REFUSED:
        keys = random_prompt(NUM_BLOCKS)
        publisher.save(keys, range(NUM_BLOCKS))
        before = reader.block_bytes.clone()
        jobs = [reader.scheduler.load([key], [block]) for block, key in enumerate(keys)]
        reader.run_until(lambda jobs=jobs: all(job in reader.loads for job in jobs), "loads")
        taken = torch.tensor([reader.loads[job].num_blocks for job in jobs], dtype=torch.bool)
        assert torch.equal(reader.block_bytes[taken], publisher.block_bytes[taken])
        refused = reader.block_bytes[~taken]
        assert (refused.eq(before[~taken]) | refused.eq(0)).all()
        num_refused += int((~taken).sum())
        num_taken += int(taken.sum())
    assert num_taken > _NUM_REFUSED // 50, "some objects are intact"
