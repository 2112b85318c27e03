"""Generated blocks that engines publish, and leases of handed-over and lent blocks."""

from dataclasses import replace

import pytest

from baton.common.errors import ConfigurationError
from engine.request import EngineOutput
from kvstore.jobs import SaveResult, TransferResults
from tests.support.driven_scheduler import DrivenScheduler, handed_over, request
from tests.support.fake_model import fake_config
from tests.support.reference_decoding import progress_of


def decode_engine(**config: object) -> DrivenScheduler:
    return DrivenScheduler(with_connector=True, role="decode", **config)


def run_handoff(driven: DrivenScheduler, num_steps: int, **fields: object) -> list[EngineOutput]:
    """Loads the KV of a request of ten tokens and runs steps; returns their outputs."""
    submitted = handed_over("a", **fields)
    driven.add(submitted)
    driven.step()
    (load,) = driven.work().loads
    driven.end_load(load, submitted.spec.prompt_token_ids)
    return driven.steps(num_steps)


class TestGeneratedBlocks:
    def test_generated_blocks_are_published_when_a_sequence_ends(self) -> None:
        driven = decode_engine(kv_publish="finish")
        run_handoff(driven, 40, max_tokens=12)
        (save,) = driven.work().saves
        # 10 prompt tokens and 12 generated ones, of which the last has no KV.
        assert len(save.keys) == 21 // 4 - 10 // 4
        assert (save.num_tail_tokens, save.num_found, save.lease_id) == (0, 0, "")
        assert driven.num_free == 32 - len(save.keys), "the blocks stay held until the save ends"
        driven.end_saves([save.job_id])
        assert driven.num_free == 32

    def test_the_next_turn_looks_up_the_keys_of_published_blocks(self) -> None:
        driven = decode_engine(kv_publish="finish", enable_prefix_caching=False)
        outputs = run_handoff(driven, 40, max_tokens=12)
        (save,) = driven.work().saves
        answer = [token for output in outputs for token in output.token_ids]
        prompt = (*handed_over("a").spec.prompt_token_ids, 0, *answer)
        driven.add(request("b", prompt_token_ids=prompt))
        driven.step()
        (lookup,) = driven.work().lookups
        assert lookup.keys == (*handed_over("a").handoff.block_keys[:2], *save.keys)

    @pytest.mark.parametrize(("interval", "sizes"), [("1", [1, 1, 1]), ("2", [2, 1]), ("9", [3])])
    def test_generated_blocks_are_published_at_an_interval_of_full_blocks(
        self, interval: str, sizes: list[int]
    ) -> None:
        driven = decode_engine(kv_publish=interval)
        submitted = handed_over("a", max_tokens=12)
        driven.add(submitted)
        driven.step()
        (load,) = driven.work().loads
        driven.end_load(load, submitted.spec.prompt_token_ids)
        saves = []
        for _ in range(40):
            driven.step()
            saves += driven.work().saves
        assert [len(save.keys) for save in saves] == sizes
        assert len({key for save in saves for key in save.keys}) == 3

    def test_generated_blocks_are_not_published_if_publishing_is_off(self) -> None:
        driven = decode_engine(kv_publish="off")
        run_handoff(driven, 40, max_tokens=12)
        assert driven.work().saves == []

    def test_a_finished_candidate_is_published_as_ended(self) -> None:
        """The router has found a stop string while further tokens are being computed."""
        driven = decode_engine(kv_publish="finish")
        run_handoff(driven, 8, max_tokens=12)
        in_flight = driven.begin()
        (end,) = driven.scheduler.finish_candidate("a", 0)
        assert end.is_last
        (save,) = driven.work().saves
        assert len(save.keys) == 18 // 4 - 10 // 4
        driven.end(in_flight)
        driven.end_saves([save.job_id])
        assert driven.num_free == 32

    def test_blocks_that_are_not_computed_are_not_published(self) -> None:
        driven = decode_engine(kv_publish="finish", max_num_batched_tokens=9)
        submitted = request("a", 30)
        driven.add(replace(submitted, progress=(progress_of(submitted, 0, (0,)),)))
        driven.step()
        driven.answer()
        driven.step()
        driven.scheduler.finish_candidate("a", 0)
        (save,) = driven.work().saves
        assert len(save.keys) == 9 // 4

    def test_an_aborted_request_publishes_nothing(self) -> None:
        driven = decode_engine(kv_publish="finish")
        run_handoff(driven, 8, max_tokens=12)
        driven.scheduler.abort(["a"])
        assert driven.work().saves == []

    def test_blocks_are_published_before_they_leave_their_window(self) -> None:
        driven = DrivenScheduler(
            with_connector=True, role="decode", windows=(None, 4), kv_publish="finish"
        )
        driven.add(request("a", 9, max_tokens=20))
        saves = []
        for _ in range(60):
            driven.step()
            saves += driven.answer().saves
        # 28 tokens have KV: seven blocks, each in both groups.
        assert len({key for save in saves for key in save.keys}) == 14

    @pytest.mark.parametrize("policy", ["", "never", "0", "-1", "1.5"])
    def test_a_bad_policy_is_refused(self, policy: str) -> None:
        with pytest.raises(ConfigurationError, match="--kv-publish"):
            fake_config(kv_publish=policy)


class TestLeases:
    def test_a_handoff_is_kept_until_its_load_has_ended(self) -> None:
        driven = decode_engine()
        submitted = handed_over("a")
        driven.add(submitted)
        assert driven.work().kept == [submitted.handoff]
        driven.step()
        work = driven.work()
        assert work.dropped == []
        driven.end_load(work.loads[0], submitted.spec.prompt_token_ids)
        assert driven.work().dropped == [submitted.handoff.handoff_id]

    def test_a_handoff_is_dropped_if_its_request_is_aborted(self) -> None:
        driven = decode_engine()
        submitted = handed_over("a")
        driven.add(submitted)
        driven.scheduler.abort(["a"])
        assert driven.work().dropped == [submitted.handoff.handoff_id]

    def test_lent_blocks_stay_until_they_are_released(self) -> None:
        driven = DrivenScheduler(with_connector=True, role="prefill")
        driven.add(request("a", 10))
        driven.step()
        driven.answer()
        driven.step()
        saves = driven.work().saves
        assert len({save.lease_id for save in saves}) == 1
        results = tuple(SaveResult(s.job_id, committed=True, is_held=True) for s in saves)
        outputs = driven.scheduler.apply(TransferResults(saves=results))
        assert outputs[-1].handoff.handoff_id == saves[0].lease_id
        assert (driven.num_free, driven.scheduler.num_transfers) == (32 - 3, 0)
        driven.scheduler.release_handoff(saves[0].lease_id)
        assert driven.work().ended == [saves[0].lease_id]
        driven.scheduler.apply(TransferResults(released=tuple(save.job_id for save in saves)))
        assert driven.num_free == 32

    def test_a_prompt_that_is_not_handed_over_ends_its_lease(self) -> None:
        driven = DrivenScheduler(with_connector=True, role="prefill", max_num_batched_tokens=4)
        driven.add(request("a", 10))
        driven.step()
        driven.answer()
        driven.step()
        (save,) = driven.work().saves
        driven.scheduler.abort(["a"])
        assert driven.work().ended == [save.lease_id]

    def test_a_save_counts_the_blocks_found_in_the_cache(self) -> None:
        driven = DrivenScheduler(with_connector=True, role="prefill")
        for name in ("a", "b"):
            driven.add(request(name, 10))
            driven.step()
            saves = driven.answer().saves  # the second prompt is cached, and not looked up
            driven.step()
            full = (saves or driven.work().saves)[0]
            assert full.num_found == (0 if name == "a" else 2)
            driven.end_saves([full.job_id])
