"""The typed clients of a worker, blocking and for asyncio."""
