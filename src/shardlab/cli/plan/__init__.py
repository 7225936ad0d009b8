"""The command `shardlab plan`."""
