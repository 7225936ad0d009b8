"""Time and memory of a tape: clocks and memory (`timeline`), rewrites (`passes`), devices and links (`hardware`), and
forecasts for a cluster (`predict`). Read them in this order.

The package itself is callable: `shardlab.simulate(...)` simulates a strategy (see `shardlab.api`).
"""
