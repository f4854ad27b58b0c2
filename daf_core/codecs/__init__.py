"""How an activation is stored: one form a file, in the order of `registry.CODECS`.

raw, verbatim, bitmask and narrow_int are exact; planes, logarithms, probabilities and slopes are codes of few bits;
shape, sides and signs keep what one operator reads. product, normalized, sum, scaled, cast and attended follow from
other activations.
"""
