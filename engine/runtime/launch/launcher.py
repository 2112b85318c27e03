"""`Launcher`: loads a model, sizes its pools and warms its steps up."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.kv_cache.spec import LayerGroups, slicing_of
from engine.models.layers import CausalModel
from engine.models.part import WHOLE_MODEL, ModelPart
from engine.runner import ModelInfo, StepCosts
from engine.runtime.device import resolve_device, used_bytes
from engine.runtime.drafting.draft_heads import EagleDrafter, MedusaDrafter
from engine.runtime.drafting.draft_model import DraftModel, check_draft_model
from engine.runtime.drafting.drafter import Drafter
from engine.runtime.draws.logits_processors import (
    AnyProcessor,
    ProcessorContext,
    load_processors,
    make_processors,
)
from engine.runtime.kv_pool import check_kv_cache_dtype, decide_layout, share_of
from engine.runtime.launch.attention_backend import check_flashinfer, uses_flashinfer
from engine.runtime.launch.compile_ahead import compile_ahead, draw_once
from engine.runtime.launch.pools import Pools
from engine.runtime.launch.trial_steps import TrialSteps
from engine.runtime.launch.worker_plan import plan_memory, start_threads
from engine.runtime.rank_batches import check_same_engine
from engine.runtime.state_pool import StateMemory, state_layout
from engine.runtime.steps.device_steps import DeviceSteps
from engine.runtime.steps.host_steps import HostSteps
from engine.runtime.steps.stage_steps import DeviceStageSteps, StageSteps
from engine.runtime.steps.steps import StepModel, Steps
from engine.runtime.turns import Turns
from engine.runtime.weights.loader import LoadedModel, layer_groups_of, load_model
from kernels import EngineRanks
from kernels.first_launch import check_launch
from kvstore.mover.pool_objects import view_blocks

__all__ = ["LaunchedModel", "Launcher"]

_MAX_MODEL_LEN = 2**26  # block tables have room for it; config.json may state any integer


def _make_drafter(
    config: EngineConfig,
    served: LoadedModel,
    info: ModelInfo,
    device: torch.device,
    *,
    progress: bool,
) -> Drafter | None:
    """Loads the model or heads that draft tokens behind the served model's steps; None if none do.

    Args:
        config: the engine's flags.
        served: the served model.
        info: its properties.
        device: of the served model.
        progress: whether loading shows a progress bar.

    Raises:
        ConfigurationError: the checkpoint is invalid, or does not fit the served model.
    """
    speculative = config.speculative_config
    if speculative is None or not speculative.has_model:
        return None
    name = speculative.model
    assert name is not None, "such methods have a model"
    if speculative.method == "medusa":
        return MedusaDrafter(config, served, info, device, name)
    if speculative.method in ("eagle", "eagle3"):
        is_eagle3 = speculative.method == "eagle3"
        return EagleDrafter(config, served, info, device, name, is_eagle3=is_eagle3)
    return DraftModel(config, served, info, device, progress=progress)


@dataclass(frozen=True, slots=True)
class LaunchedModel:
    """A model that is ready to run steps.

    Attributes:
        model: this rank's part of the model.
        info: properties of the whole model.
        device: where the model is.
        processors: the logits processors.
        turns: the turns in which workers of one machine compute.
        pools: the blocks.
        costs: measured times.
        steps: the steps over the pool, warmed up.
    """

    model: CausalModel
    info: ModelInfo
    device: torch.device
    processors: tuple[AnyProcessor, ...]
    turns: Turns
    pools: Pools
    costs: StepCosts
    steps: Steps


class Launcher:
    """Loads the model; `launch` does the rest.

    Args:
        config: the flags.
        progress: whether loading shows a progress bar.
        ranks: all ranks of the engine, of which this process is one; None for one rank.

    Raises:
        ConfigurationError: a flag or the checkpoint is invalid.
    """

    def __init__(self, config: EngineConfig, *, progress: bool, ranks: EngineRanks | None) -> None:
        self._config = config
        self._ranks = ranks
        self._num_local = 1 if ranks is None else ranks.num_local
        self._part = part = _part_of(ranks)
        self._device = resolve_device(config.device, None if ranks is None else ranks.local_rank)
        check_kv_cache_dtype(config.kv_cache_dtype, self._device)
        self._is_on_cpu = self._device.type == "cpu"
        if not self._is_on_cpu:
            check_launch(self._device)  # before minutes of loading
        self._uses_flashinfer = uses_flashinfer(config, self._device)
        self._steps_type = _steps_type_of(part, self._device)
        if self._is_on_cpu:
            start_threads(config, self._num_local)
        # Before minutes of loading, as an unknown name is an error.
        processor_classes = load_processors(config.logits_processors)
        if config.speculative_config is not None:
            check_draft_model(config.speculative_config)
        self._used_by_others = used_bytes(self._device)
        self._loaded = load_model(
            config.model,
            config.dtype,
            self._device,
            progress=progress,
            load_format=config.load_format,
            weights_folder=config.weights_folder,
            part=part,
            max_model_len=config.max_model_len,
            quantization=config.quantization,
            quantized_compute=config.quantized_compute,
        )
        model = self._loaded.model.config
        layer_groups = layer_groups_of(model)
        if self._uses_flashinfer:
            dtype, loaded = getattr(torch, self._loaded.dtype), self._loaded
            check_flashinfer(
                self._device, dtype, model.num_heads, loaded.num_kv_heads, loaded.head_dim
            )
        self._layer_slots = layer_groups.slots_of(part.stage, part.num_stages)
        self._info = _model_info(self._loaded, layer_groups, config)
        self._layout, self._states = self._info.layout, self._info.states
        if ranks is not None:
            self._join(ranks)
        self._drafter = _make_drafter(
            config, self._loaded, self._info, self._device, progress=progress
        )
        self._processors = make_processors(
            processor_classes,
            ProcessorContext(
                vocab_size=self._info.vocab_size,
                device=self._device,
                max_rows=config.max_running,
                max_model_len=self._info.max_model_len,
            ),
        )

    def _join(self, ranks: EngineRanks) -> None:
        """Takes this rank's share of blocks and slots, and checks that all ranks run the same."""
        if self._loaded.dtype == "float16":  # whose products are rounded too early
            raise ConfigurationError(
                f"the engine has {ranks.size} ranks; --dtype float16 works with 1 only: use "
                "bfloat16 or float32"
            )
        share = share_of(ranks.rank, ranks, self._layout.num_kv_heads)
        self._layout = share.layout_of(self._layout)
        if self._states is not None:
            self._states = share.states_of(self._states)
        check_same_engine(ranks, self._config, self._info)

    def launch(self) -> LaunchedModel:
        """Measures memory and times, allocates the pools, and warms the steps up.

        Raises:
            ConfigurationError: the pool cannot hold one request.
        """
        has_turns = self._is_on_cpu and self._part.num_stages == 1
        folder = self._config.turns_folder if has_turns else None
        turns = Turns(folder, read_compiling_s=_compile_timer(self._device))
        with turns.wait_for_turn():  # so that no other engine's step distorts the times
            trials = self.trials()
            if not self._is_on_cpu:
                compile_ahead(self.parts_of_steps(trials), self._device)
            free_bytes = trials.profile(self._used_by_others)
            prompt_token_s = trials.time_prompt_token()
            pools = self._make_pools(free_bytes)
            costs = self._measure_costs(prompt_token_s, pools)
            steps = self._make_steps(pools.whole, pools.states)
            steps.warm_up()
            pools.whole[0].zero_()  # dummy steps may have written KV to it
        return LaunchedModel(
            model=self._loaded.model,
            info=self._info,
            device=self._device,
            processors=self._processors,
            turns=turns,
            pools=pools,
            costs=costs,
            steps=steps,
        )

    def trials(self) -> TrialSteps:
        """Returns steps that need no pool."""
        return TrialSteps(
            self._config,
            self._make_steps,
            self._layout,
            self._states,
            self._info,
            self._device,
            num_spare_blocks=self._steps_type.num_spare_blocks,
        )

    def parts_of_steps(self, trials: TrialSteps) -> dict[str, Callable[[], object]]:
        """Returns functions that together launch most kernels of steps, by name. They may run at
        the same time: forward passes of several ranks, whose order must be the same, are not among
        them.
        """
        config = self._config
        parts: dict[str, Callable[[], object]] = {
            "draws": lambda: draw_once(self._info.vocab_size, self._device)
        }
        if self._ranks is None:
            parts["prompts"] = lambda: trials.run(config.max_step_tokens, 1)
            parts["short chunks"] = lambda: trials.run(config.max_running, config.max_running)
        return parts

    def _make_pools(self, free_bytes: int | None) -> Pools:
        drafter = self._drafter
        plan = plan_memory(
            self._config,
            self._loaded,
            self._layout,
            num_local=self._num_local,
            drafter_bytes=drafter.fixed_bytes if drafter else 0,
            is_on_cpu=self._is_on_cpu,
        )
        return Pools.make(
            self._config,
            self._info,
            self._layout,
            self._states,
            self._device,
            free_bytes=free_bytes,
            num_spare_blocks=self._steps_type.num_spare_blocks,
            plan=plan,
            drafter=drafter,
            ranks=self._ranks,
        )

    def _measure_costs(self, prompt_token_s: float, pools: Pools) -> StepCosts:
        costs = StepCosts(prompt_token_s, pools.time_swapped_block(self._device))
        if self._drafter is None:
            return costs
        draft_token_s, proposal_s = self._drafter.time_work()
        return replace(
            costs,
            draft_token_s=draft_token_s,
            proposal_s=proposal_s,
            max_proposals=self._drafter.max_proposals,
        )

    def _make_steps(self, pool: torch.Tensor, states: StateMemory | None) -> Steps:
        config, info = self._config, self._info
        return self._steps_type(
            StepModel(
                model=self._loaded.model,
                kv=view_blocks(pool, self._layout),
                layer_slots=self._layer_slots,
                num_layer_groups=info.num_layer_groups,
                block_size=info.layout.block_size,
                max_rows=config.max_running,
                max_tokens=config.max_step_tokens,
                max_model_len=info.max_model_len,
                enforce_eager=config.enforce_eager,
                reports_processed=config.logprobs_mode == "processed_logprobs",
                processors=self._processors,
                ranks=self._ranks,
                dtype=getattr(torch, self._loaded.dtype),
                max_drafts=config.max_drafts,
                drafter=self._drafter,
                states=states,
                uses_flashinfer=self._uses_flashinfer,
            )
        )


def _model_info(loaded: LoadedModel, layer_groups: LayerGroups, config: EngineConfig) -> ModelInfo:
    max_model_len = config.max_model_len or loaded.max_model_len
    if max_model_len > loaded.max_model_len:
        raise ConfigurationError(
            f"--max-model-len is {max_model_len}; the model takes at most {loaded.max_model_len}"
        )
    if max_model_len > _MAX_MODEL_LEN:
        raise ConfigurationError(
            f"the model takes {max_model_len} tokens, more than can be served; "
            f"set --max-model-len to at most {_MAX_MODEL_LEN}"
        )
    layout = decide_layout(config, loaded, layer_groups)
    states = state_layout(loaded.model.config, loaded.dtype)
    if config.kv_connector is not None:
        states = slicing_of(config, layout, states).slots
    return ModelInfo(
        max_model_len=max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        fingerprint=loaded.fingerprint,
        tokenizer_digest=loaded.tokenizer_digest,
        layout=layout,
        windows=layer_groups.windows,
        states=states,
    )


def _compile_timer(device: torch.device) -> Callable[[], float]:
    """Returns a function that reads how long this process has compiled kernels for the device."""
    if device.type != "cuda":
        return lambda: 0.0
    from kernels.triton.compile_clock import compile_clock  # an image for CPUs has no Triton

    return compile_clock().read_s


def _part_of(ranks: EngineRanks | None) -> ModelPart:
    """Returns the part of the model that a rank computes."""
    if ranks is None:
        return WHOLE_MODEL
    return ModelPart(ranks.group, ranks.stage, ranks.num_stages)


def _steps_type_of(part: ModelPart, device: torch.device) -> type[Steps]:
    """Returns the class that computes the steps of a part of the model on a device."""
    if device.type == "cpu":
        return HostSteps if part.is_last else StageSteps
    return DeviceSteps if part.is_last else DeviceStageSteps
