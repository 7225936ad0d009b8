"""Training: the data, and what is done with it step by step."""
