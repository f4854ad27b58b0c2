"""Operators, and what their backward asks of what they have saved."""
