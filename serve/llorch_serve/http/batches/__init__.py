"""OpenAI's files and batches: kept in a folder, and answered by the front's own routes."""
