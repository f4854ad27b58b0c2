"""What the machine and the process have left, and what can be given back to them."""
