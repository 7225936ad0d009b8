"""The algebra of values: the pieces that a value holds, the contributions summed into it, and a rule for every op.

The rules are pure functions from specs to specs, without ranks or tapes. Read in this order: `kinds` (kinds of value,
indices, bit sets of pieces), `spec` (the spec of a value), `arithmetic` and `collectives` (sums and concatenations),
`layer_graph` and `layer_rules` (passes of layers), `attention`, `optimizer_step` (loss, norm and update). `refusals`
has the requirements that several rules share.
"""
