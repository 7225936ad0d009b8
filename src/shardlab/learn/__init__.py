"""Teaching material: the LLM Training Puzzles, in puzzles/."""
