"""One training run, whichever trainer drives it."""
