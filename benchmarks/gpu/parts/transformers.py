"""Measures transformers' continuous batching on random weights and the same requests."""

import time
from typing import Any

import torch

from benchmarks.gpu.plan import MODELS, Plan
from benchmarks.gpu.record import Record
from benchmarks.model_cost import Ceilings
from benchmarks.offline.cases import Case

__all__ = ["measure"]

_NO_TOKEN = -1  # ends no sequence


def measure(plan: Plan, ceilings: Ceilings | None, record: Record, model: str) -> None:
    """Serves requests that arrive at once; `ceilings` are not used."""
    record.attempt("served by transformers", model, lambda: _served(plan, model))


def _served(plan: Plan, name: str) -> dict[str, Any]:
    import transformers

    model = _random_model(plan, name)
    case = Case(*plan.served)
    settings = transformers.GenerationConfig(
        do_sample=False,
        eos_token_id=_NO_TOKEN,
        pad_token_id=_NO_TOKEN,
        max_new_tokens=case.output_len,
    )
    took_s = 0.0
    for seed in (1, 2):  # the first run warms up, and creates the persistent manager
        prompts = [
            list(request.prompt_token_ids)
            for request in case.requests(MODELS[name]["vocab_size"], seed)
        ]
        started = time.perf_counter()
        outputs = model.generate_batch(prompts, settings, _memory_of(plan), persistent_manager=True)
        took_s = time.perf_counter() - started
    lengths = [len(output.generated_tokens) for output in outputs.values()]
    if lengths != [case.output_len] * case.batch_size:
        raise RuntimeError(f"answers have {lengths} tokens, not {case.output_len} each")
    return {
        "output_tokens_per_s": sum(lengths) / took_s,
        "attention": model.config._attn_implementation,
    }


def _memory_of(plan: Plan) -> Any:
    """Returns the size of its KV cache; None for what the device allows."""
    from transformers.generation import ContinuousBatchingConfig

    if plan.num_gpu_blocks is None:
        return None
    return ContinuousBatchingConfig(
        num_blocks=plan.num_gpu_blocks, max_batch_tokens=plan.max_batched_tokens
    )


def _random_model(plan: Plan, name: str) -> Any:
    import transformers

    fields = dict(MODELS[name])
    fields.pop("architectures")
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    with torch.device(plan.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, plan.dtype)
        )
    return model.eval()
