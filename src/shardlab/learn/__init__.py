"""Teaching material: the course in `course/`, and the LLM Training Puzzles in `puzzles/`."""
