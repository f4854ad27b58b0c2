"""What each policy would cost for each block."""
