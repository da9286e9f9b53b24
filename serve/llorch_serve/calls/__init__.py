"""What every front shares: who calls, whether there is room, and updates on their way to a caller."""
