"""The time and memory of a step without its whole tape: equal steps of a schedule are computed once."""
