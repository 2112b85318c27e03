"""OpenAI's batches over a folder: their files, their records, and the process that runs them."""
