"""Chats to prompts by a model's template, and answers to messages, thoughts and tool calls."""
