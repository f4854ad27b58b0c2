"""How an activation is stored: a file for each form, or for forms of one kind, tried in the order of `registry.CODECS`.

raw, verbatim, bitmask and narrow_int are exact; planes, logarithms, probabilities and slopes are codes of few bits;
shape, sides and signs keep what one operator reads. product, rectified, normalized, sum, scaled, cast, elementwise and
attended follow from other activations; what is bounded or probed has another form inside.
"""
