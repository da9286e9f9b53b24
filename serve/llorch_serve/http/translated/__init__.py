"""What the APIs that are translated to chats share: reading typed blocks, one plan, and answers in pieces."""
