"""Teaching: the puzzles."""
