"""The command `shardlab train`, and `shardlab.train` of Python."""
