"""Shell scripts as far as arguments need them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardlab.frameworks.shell import Word, flags_of, run_script


def words_of(text: str) -> list[str]:
    """Return the words of the last command of a script."""
    return [word.text for word in run_script(text).commands[-1]]


def test_variables_arrays_and_continued_lines_become_words() -> None:
    text = """
    TP=8
    MORE="--lr 1e-4 \\
        --bf16"
    A=(
        --tp $TP  # a comment
        --name 'two words'
    )
    A+=(--pp ${PP:-4})
    torchrun --nnodes $((TP / 4)) train.py "${A[@]}" $MORE \\
        --last "x y" 2>&1 | tee log
    """
    expected = ["torchrun", "--nnodes", "2", "train.py", "--tp", "8", "--name", "two words", "--pp", "4"]
    assert run_script(text).commands[0][0].text == "torchrun"
    assert [word.text for word in run_script(text).commands[0]] == [
        *expected,
        *("--lr", "1e-4", "--bf16", "--last", "x y"),
    ]


def test_text_is_appended_to_a_variable_and_to_an_empty_array() -> None:
    assert words_of("A=--tp\nA+==2\nrun $A") == ["run", "--tp=2"]
    assert words_of("A=()\nA+=--tp=2\nrun $A") == ["run", "--tp=2"]


def test_a_word_keeps_the_line_of_its_array() -> None:
    script = run_script("A=(\n  --tp 2\n  --pp 3\n)\nX='--a 1'\nrun \"${A[@]}\" $X\n")
    assert script.commands[0][1:] == [
        Word("--tp", 2),
        Word("2", 2),
        Word("--pp", 3),
        Word("3", 3),
        Word("--a", 5),
        Word("1", 5),
    ]


def test_words_of_an_unquoted_array_are_split() -> None:
    assert words_of('A=("--fp8-format hybrid")\nrun ${A[@]}') == ["run", "--fp8-format", "hybrid"]


def test_a_variable_without_a_value_stays_visible() -> None:
    assert words_of("run --tp $TP --data ${1}") == ["run", "--tp", "${TP}", "--data", "${1}"]


def test_a_given_value_replaces_an_assignment() -> None:
    script = run_script("TP=8\nrun --tp $TP", {"TP": "2"})
    assert [word.text for word in script.commands[-1]] == ["run", "--tp", "2"]


def test_known_conditions_are_followed_and_others_are_named() -> None:
    script = run_script("""
    D=fp8
    if [[ "$D" == "fp8" ]]; then A=(--fp8 yes); else A=(--fp8 no); fi
    if [ -n "$KEY" ]; then A+=(--wandb); fi
    case $D in
        bf16) A+=(--bf16) ;;
        fp8 | fp16) A+=(--other) ;;
    esac
    run "${A[@]}"
    """)
    assert [word.text for word in script.commands[-1]] == ["run", "--fp8", "yes", "--other"]
    assert len(script.notes) == 1
    assert "KEY" in script.notes[0]


def test_here_documents_and_comments_are_left_out() -> None:
    assert words_of("cat <<EOF > hosts\n--tp 4\nEOF\n# run --tp 3\nrun --tp 2") == ["run", "--tp", "2"]


def test_the_schedulers_directives_are_flags() -> None:
    script = run_script("#SBATCH --nodes=4\n#SBATCH --gres=gpu:8  # all\nrun")
    assert [name for name, *_ in flags_of(script.directives)] == ["--nodes", "--gres"]


def test_negative_numbers_are_values() -> None:
    assert flags_of([Word("--shard", 1), Word("-1", 1)]) == [("--shard", "-1", 1)]


@given(st.text(st.sampled_from("ab$\"'`\\(){}[]=;|&<>\n #!-+1if then fi case in esac do done"), max_size=80))
def test_no_text_ends_in_an_error(text: str) -> None:
    run_script(text)
