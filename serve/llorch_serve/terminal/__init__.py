"""What a person at a terminal sees: the commands, their progress and their errors."""
