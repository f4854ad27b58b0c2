"""Steps by a plan, and again if memory runs out."""
