"""Speculation: drafts of a sequence's next tokens, which a step checks together. Pure."""
