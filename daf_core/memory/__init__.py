"""Where encoded activations lie: the page pool and its books."""
