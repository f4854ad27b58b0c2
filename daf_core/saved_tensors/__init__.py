"""From the pack hook to the unpack hook: what a saved tensor is, and what is stored in its place."""
