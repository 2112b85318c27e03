"""A script for vLLM's Python API, of which only the import has changed.

    python examples/from_vllm.py [MODEL]

Without a model it runs the demo model, which writes text of the right form that makes little
sense.
"""

import sys

# It was: from vllm import LLM, SamplingParams
# and: from vllm.sampling_params import BeamSearchParams
from baton import LLM, BeamSearchParams, SamplingParams

PROMPTS = [
    "Open the file and",
    "The capital of France is",
    {"prompt": "Returns the number of"},
]


def main(model: str) -> None:
    """Completes prompts, answers a chat, and searches the likeliest completions."""
    llm = LLM(
        model=model,
        tensor_parallel_size=1,
        trust_remote_code=False,
        dtype="float32",
        max_model_len=256,
        gpu_memory_utilization=0.8,
        seed=0,
    )

    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, n=2)
    for output in llm.generate(PROMPTS, sampling_params=sampling_params, use_tqdm=False):
        print(f"{output.prompt!r} ({len(output.prompt_token_ids)} tokens)")
        for candidate in output.outputs:
            print(f"  {candidate.index}: {candidate.text!r} ({candidate.finish_reason})")

    messages = [{"role": "user", "content": "How do I open a file?"}]
    tokenizer = llm.get_tokenizer()
    print(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    print(f"  {llm.chat(messages, sampling_params, use_tqdm=False)[0].outputs[0].text!r}")

    greedy = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    first = llm.generate(PROMPTS[0], greedy, use_tqdm=False)[0].outputs[0]
    for token_id, found in zip(first.token_ids, first.logprobs, strict=True):
        print(f"  {found[token_id].decoded_token!r} {found[token_id].logprob:.2f}")

    beams = llm.beam_search(PROMPTS[2:], BeamSearchParams(beam_width=3, max_tokens=8))
    for sequence in beams[0].sequences:
        print(f"  {sequence.cum_logprob:.2f} {sequence.text!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo")
