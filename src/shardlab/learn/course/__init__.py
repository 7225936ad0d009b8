"""The course: exercises in parallel training, from one rank to a plan for a cluster.

Read `exercise.py` first: the parts of an exercise. `catalogue.py` finds the exercises, `grading.py` grades a solution
with the predicates of `techniques.py`, and `folder.py` has the folder of a student and the progress. In a notebook:

>>> from shardlab.learn.course import check

    check("ddp", my_ddp)
"""

from shardlab.learn.course.folder import check
from shardlab.learn.course.grading import ExerciseGrade

__all__ = ["ExerciseGrade", "check"]
