"""`python -m shardlab`: the same as the `shardlab` command."""

from shardlab.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
