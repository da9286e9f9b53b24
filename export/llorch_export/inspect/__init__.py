"""What an artifact holds, matrix by matrix."""
