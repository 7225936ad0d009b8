"""The course: exercises in parallel training, from one rank to a plan for a cluster.

Read `exercise.py` first: what an exercise consists of.
"""
