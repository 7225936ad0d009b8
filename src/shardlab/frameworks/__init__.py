"""Configurations of other frameworks: read them, and say which of their keys matter.

Read `settings` (keys with their lines, and the table of each framework that says what a key means), `find` (which
framework a file is for) and `run` (the step that a configuration describes). Each framework has one module and one
table in TOML, with the commit of its source: `torchtitan`, `megatron`, `nemo`, `nanotron`, `deepspeed` (which also has
accelerate). `shell` expands the scripts that hold arguments. `changes` tries the smallest changes that would help, and
`measured` explains why a measured step differs from its prediction. A table is read in both directions: from keys to
meanings, and by `writers` from meanings to keys.
"""
