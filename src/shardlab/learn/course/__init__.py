"""The course: exercises in parallel training, from one rank to a plan for a cluster.

Read `exercise.py` first: what an exercise consists of. `catalogue.py` finds the exercises, `grading.py` grades a
solution with the predicates of `techniques.py`, and `folder.py` is the folder of a student with its progress. In a
notebook:

>>> from shardlab.learn.course import check

    check("ddp", my_ddp)
"""

from shardlab.learn.course.grading import ExerciseGrade, check

__all__ = ["ExerciseGrade", "check"]
