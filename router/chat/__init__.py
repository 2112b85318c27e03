"""Chats: messages become a prompt; generated text becomes content, reasoning and tool calls."""
