"""What comes from outside as files and documents: written whole or not at all, and read with suspicion."""
