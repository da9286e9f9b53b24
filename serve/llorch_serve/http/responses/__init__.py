"""OpenAI's Responses API: /v1/responses, translated to chats, and what is kept of its answers."""
