"""Chats: from messages to a prompt, and from text to content, reasoning and tool calls."""
