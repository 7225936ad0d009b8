"""`python -m shardlab`: the same as the `shardlab` command."""

from shardlab.cli import main

if __name__ == "__main__":
    status = main()
    # `python -m` ends by SIGINT, whatever the status, if Ctrl-C arrived in an `exec` of text, as in the definition of a
    # dataclass. The next `exec` clears that mark (`run_eval_code_obj` in CPython's pythonrun.c).
    exec("")
    raise SystemExit(status)
