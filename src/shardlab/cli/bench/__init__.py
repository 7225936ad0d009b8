"""The commands `shardlab bench`."""
