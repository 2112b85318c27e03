"""Endpoints: a Baton router over gRPC, or an OpenAI-style HTTP endpoint."""
