"""Where requests are sent: a Baton router over gRPC, or an OpenAI-style HTTP endpoint."""
