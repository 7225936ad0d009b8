"""Time and memory of a tape. Read in this order: `timeline` (clocks and memory), `passes` (rewrites of tapes),
`hardware` (devices and links) and `predict` (predictions for a cluster).

The package itself is callable: `shardlab.simulate(...)` simulates a strategy (see `shardlab.api`).
"""
