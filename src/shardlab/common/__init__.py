"""Helpers that know nothing of parallel training.

Start with `errors` (`UserError` for a wrong request, `Refused` for a wrong program). `text` turns numbers, bytes and
times into text and back, `files` reads and writes files atomically, `fields` describes the fields of a dataclass as
flags, TOML and JSON, `memory` measures and limits memory, `processes` ends a process with the one that started it, and
`user_code` loads and runs a user's Python file.
"""
