"""The command `shardlab simulate`."""
