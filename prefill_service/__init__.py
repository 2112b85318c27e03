"""The prefill tier's server: computes prompts and hands their KV over."""
