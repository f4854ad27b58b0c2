"""How many bits an activation deserves."""
