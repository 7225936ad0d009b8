"""The texts that are made from an exercise's module."""

from __future__ import annotations

import ast

from hypothesis import given
from hypothesis import strategies as st

from shardlab.learn.course.catalogue import all_entries
from shardlab.learn.course.exercise import file_text

MODULE = '''"""A statement."""

from fractions import Fraction

from shardlab.language import Mesh, Rank
from shardlab.learn.course.exercise import Exercise


async def f(rank: Rank) -> None:
    first()
    # BEGIN SOLUTION
    second()
    # START
    # if second_of_the_start():
    #     deeper()
    # END SOLUTION
    # BEGIN SOLUTION
    third()
    # END SOLUTION


# END OF THE EXERCISE

EXERCISE = Exercise(mesh=Mesh(), share=Fraction(1, 2))
'''


def test_the_solution_has_the_regions_without_their_marks() -> None:
    text = file_text(MODULE, solved=True)
    assert "    first()\n    second()\n    third()\n" in text
    assert "START" not in text
    assert "EXERCISE" not in text


def test_the_start_has_what_stands_after_start_and_a_place_for_the_rest() -> None:
    text = file_text(MODULE, solved=False)
    assert "    first()\n    if second_of_the_start():\n        deeper()\n    # Your code here.\n" in text
    assert "third" not in text


def test_names_that_only_the_grader_needs_are_not_imported() -> None:
    text = file_text(MODULE, solved=False)
    assert text.startswith('"""A statement."""\n\nfrom shardlab.language import Rank\n\n\nasync def f(')


def test_no_file_of_a_student_shows_the_grader() -> None:
    for entry in all_entries():
        for text in (entry.start_text, entry.solution_text):
            assert ast.get_docstring(ast.parse(text)) == entry.statement
            assert "shardlab.learn.course" not in text
            assert not any(mark in text for mark in ("# BEGIN SOLUTION", "# START", "# END"))
            assert not any(hint in text for hint in entry.exercise.hints)


@given(st.lists(st.sampled_from(["a()", "# a comment", "", "if x:", "    b()"])))
def test_a_program_without_regions_stays_as_it_is(lines: list[str]) -> None:
    text = "\n".join(["def f():", *(f"    {line}".rstrip() for line in lines), "    pass"])
    try:
        ast.parse(text)
    except SyntaxError:
        return
    assert file_text(text, solved=True) == file_text(text, solved=False) == text + "\n"
