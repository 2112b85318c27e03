"""The router's HTTP door: OpenAI's API, and others, over the same pipeline as gRPC."""
