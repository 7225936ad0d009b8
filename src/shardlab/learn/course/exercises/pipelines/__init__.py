"""Exercises 13 to 20: pipelines and their schedules."""
