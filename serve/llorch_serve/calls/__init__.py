"""What every front shares: the front desk that admits and ends calls, who calls, and updates for a caller."""
