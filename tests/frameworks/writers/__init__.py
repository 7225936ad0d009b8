"""Tests of `shardlab.frameworks.writers`."""
