"""Training loops of the user's own, and Lightning Fabric's."""
