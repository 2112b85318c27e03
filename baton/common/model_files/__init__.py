"""The files of a model besides its weights: config, tokenizer, GGUF, names of models."""
