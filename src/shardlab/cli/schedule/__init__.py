"""`shardlab schedule search`: `search.py` has the command and its report, `costs.py` reads the costs of stages."""
