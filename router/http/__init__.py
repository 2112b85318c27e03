"""The router's HTTP server: OpenAI's and Anthropic's APIs over the same pipeline as gRPC."""
