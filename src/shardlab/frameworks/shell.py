"""Shell scripts that start a training: variables, arrays and line continuations, as far as arguments need them.

`run_script` follows a script from top to bottom without running anything. It keeps variables and arrays, and the
commands with their words and lines. It expands `$A`, `${A:-B}`, `${A[@]}` and `$((A * B))`. A variable without a value
stays in the word as `${A}`. A condition that depends on such a variable counts as false, and is named in
`Script.notes`. The output of commands (`$(...)`) is not known. `flags_of` groups words into flags with their values.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from shardlab.frameworks.settings import UNSET, Setting

OPERATORS = ("&&", "||", ";;", "|", ";", "&", "\n", "(", ")", "<<<", "<<", ">>", ">", "<")

ARRAY = "(...)"


class Word(NamedTuple):
    """Word of a command after expansion, and its line."""

    text: str
    line: int


class Token(NamedTuple):
    """Raw word of a script with its quotes, or an operator, and its line."""

    text: str
    line: int
    is_operator: bool = False


@dataclass
class Script:
    """Variables, commands and directives of a shell script.

    Attributes:
        variables: words of each variable: one, or the elements of an array.
        commands: words of each command, without the assignments before the command.
        directives: options of the scheduler (#SBATCH, #PBS), as flags with their values.
        notes: loops and conditions that were not followed, as text.
    """

    variables: dict[str, list[Word]] = field(default_factory=dict[str, list[Word]])
    commands: list[list[Word]] = field(default_factory=list[list[Word]])
    directives: list[Word] = field(default_factory=list[Word])
    notes: list[str] = field(default_factory=list[str])

    def value(self, name: str) -> Word | None:
        """Return the value of a variable, or the first element of an array; None if there is none."""
        return next(iter(self.variables.get(name, ())), None)


def run_script(text: str, variables: Mapping[str, str] | None = None) -> Script:
    """Follow a script without running it, and return its variables and commands.

    Args:
        text: the script.
        variables: values of variables that take precedence over the script's assignments.
    """
    script = Script()
    fixed = dict(variables or {})
    script.variables |= {name: [Word(value, 0)] for name, value in fixed.items()}
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"#(?:SBATCH|PBS|BSUB)\s+(.*)", line):
            script.directives += [Word(word, number) for word in match[1].split("#")[0].replace("=", " ").split()]
    _Runner(script, fixed, list(tokens(text))).block(frozenset(), active=True)
    return script


def tokens(text: str) -> Iterator[Token]:
    """Yield the words and operators of a script. Comments and the text of here-documents are left out."""
    position, line, size = 0, 1, len(text)
    word, begin = "", 1
    delimiters: list[str] = []  # ends of here-documents
    while position < size:
        char = text[position]
        if char == "\\" and position + 1 < size:
            if text[position + 1] == "\n":
                line += 1
            else:
                begin = begin if word else line
                word += text[position : position + 2]
            position += 2
            continue
        end = _end_of_quoted(text, position)
        if end > position:
            begin = begin if word else line
            word += text[position:end]
            line += text.count("\n", position, end)
            position = end
            continue
        if char == "(" and word.endswith("=") and re.fullmatch(r"[A-Za-z_]\w*\+?=", word):  # an array begins
            yield Token(word + ARRAY, begin)
            word = ""
            position += 1
            continue
        symbol = next((candidate for candidate in OPERATORS if text.startswith(candidate, position)), "")
        if symbol or char in " \t\r" or (char == "#" and not word):
            if symbol[:1] in (">", "<") and symbol and word.isdecimal():  # a file's number, as in 2>&1
                word = ""
            if word:
                yield Token(word, begin)
                if delimiters and delimiters[-1] == "":
                    delimiters[-1] = word.strip("'\"")
                word = ""
            if char == "#":
                position = text.find("\n", position) if "\n" in text[position:] else size
                continue
            if symbol:
                if symbol == "<<":
                    delimiters.append("")
                    position += text.startswith("<<-", position)
                yield Token(symbol, line, is_operator=True)
            line += symbol == "\n"
            position += len(symbol) or 1
            if symbol == "\n" and delimiters and all(delimiters):
                while delimiters and position < size:
                    stop = text.find("\n", position)
                    stop = size if stop < 0 else stop
                    if text[position:stop].strip() == delimiters[0]:
                        delimiters.pop(0)
                    position, line = min(size, stop + 1), line + 1
                delimiters.clear()
            continue
        begin = begin if word else line
        word += char
        position += 1
    if word:
        yield Token(word, begin)


def _end_of_quoted(text: str, position: int) -> int:
    """Return the end of the quoted part, substitution or parameter at `position`; `position` if there is none."""
    if text[position] == "'":
        end = text.find("'", position + 1)
        return len(text) if end < 0 else end + 1
    if text[position] == '"':
        return _closing(text, position + 1, '"')
    if text[position] == "`":
        return _closing(text, position + 1, "`")
    if text.startswith("${", position):
        return _closing(text, position + 2, "}")
    if text.startswith("$((", position):
        end = text.find("))", position)
        return len(text) if end < 0 else end + 2
    if text.startswith("$(", position):
        return _closing(text, position + 2, ")")
    return position


def _closing(text: str, position: int, closing: str) -> int:
    while position < len(text) and text[position] != closing:
        if text[position] == "\\":
            position += 2
            continue
        nested = position if closing == '"' and text[position] in "'\"" else _end_of_quoted(text, position)
        position = nested if nested > position else position + 1
    return min(len(text), position + 1)


@dataclass
class _Runner:
    """Follows the tokens of a script."""

    script: Script
    fixed: Mapping[str, str]
    tokens: Sequence[Token]
    position: int = 0

    def block(self, ends: frozenset[str], *, active: bool) -> str:
        """Follow commands until a word of `ends`, and return this word ("": the end of the script)."""
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            if token.is_operator or token.text in ("{", "}", "then", "do", "!", "function"):
                self.position += 1
                if token.text == ";;" and ";;" in ends:
                    return ";;"
                continue
            if token.text in ends:
                self.position += 1
                return token.text
            if token.text == "if":
                self.position += 1
                self._if(active=active)
            elif token.text in ("for", "while", "until", "select"):
                self.position += 1
                if active:
                    self.script.notes.append(f"line {token.line}: a loop is not followed")
                self.block(frozenset({"done"}), active=False)
            elif token.text == "case":
                self.position += 1
                self._case(active=active)
            else:
                self._command(active=active)
        return ""

    def _if(self, *, active: bool) -> None:
        line, decided = self.tokens[self.position].line if self.position < len(self.tokens) else 0, False
        word = "if"
        while word in ("if", "elif"):
            condition = [token for token in self._until("then") if token.text not in (";", "\n")]
            holds = self._test(condition) if active and not decided else False
            if holds is None:
                text = " ".join(token.text for token in condition)
                self.script.notes.append(f"line {line}: the condition {text} is not known, and counts as false")
            word = self.block(frozenset({"elif", "else", "fi"}), active=active and not decided and holds is True)
            decided = decided or holds is True
        if word == "else":
            self.block(frozenset({"fi"}), active=active and not decided)

    def _until(self, *ends: str) -> Sequence[Token]:
        """Go to the next token that is one of `ends`, and return the tokens before it."""
        begin = self.position
        while self.position < len(self.tokens) and self.tokens[self.position].text not in ends:
            self.position += 1
        return self.tokens[begin : self.position]

    def _test(self, condition: Sequence[Token]) -> bool | None:
        """Return whether a condition holds (None: it depends on a value that is not known)."""
        for place, token in enumerate(condition):
            if token.is_operator and token.text in ("&&", "||"):
                results = self._test(condition[:place]), self._test(condition[place + 1 :])
                decisive = token.text == "||"
                return decisive if decisive in results else None if None in results else not decisive
        words = ["".join(piece.text for piece in self.expand(token)) for token in condition if not token.is_operator]
        if not words or words[0] not in ("[", "[[", "test"):
            return None
        words = [word for word in words[1:] if word not in ("]", "]]")]
        inverted = bool(words) and words[0] == "!"
        result = _compare(words[inverted:])
        return result if result is None else result != inverted

    def _case(self, *, active: bool) -> None:
        head = self._until("in")
        subject = "".join(word.text for word in self.expand(head[0])) if head else ""
        self.position += 1
        is_known, decided = UNSET not in subject, False
        if active and not is_known:
            self.script.notes.append(f"line {head[0].line}: the case of {subject} is not known, and none is followed")
        while self.position < len(self.tokens):
            patterns = [token.text.strip("\"'") for token in self._until(")", "esac") if not token.is_operator]
            if self.position >= len(self.tokens) or self.tokens[self.position].text == "esac":
                self.position += 1
                return
            self.position += 1
            fits = is_known and not decided and any(fnmatchcase(subject, pattern) for pattern in patterns)
            decided = decided or fits
            if self.block(frozenset({";;", "esac"}), active=active and fits) != ";;":
                return

    def _command(self, *, active: bool) -> None:
        words: list[Word] = []
        declares = False
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            if token.is_operator:
                if token.text in (">", ">>", "<", "<<", "<<<"):
                    duplicates = [word.text for word in self.tokens[self.position + 1 : self.position + 2]] == ["&"]
                    self.position += 3 if duplicates else 2
                    continue
                break
            self.position += 1
            assignment = re.fullmatch(r"([A-Za-z_]\w*)(\+?)=(.*)", token.text, re.DOTALL)
            if assignment and (declares or not words):
                self._assign(assignment[1], bool(assignment[2]), Token(assignment[3], token.line), active=active)
            elif not words and token.text in ("export", "local", "readonly", "declare", "typeset"):
                declares = True
            elif not (declares and token.text.startswith("-")) and active:
                words += self.expand(token)
        if active and words and not declares:
            self.script.commands.append(words)

    def _assign(self, name: str, adds: bool, value: Token, *, active: bool) -> None:
        if value.text == ARRAY:
            words = list(self.script.variables.get(name, [])) if adds else []
            for token in self._until(")"):
                if not token.is_operator and active:
                    words += self.expand(token)
            self.position += 1
        else:
            text = " ".join(word.text for word in self.expand(value, split=False))
            old_word = (self.script.value(name) if adds else None) or Word("", value.line)
            words = [Word(old_word.text + text, old_word.line)]
        if active and name not in self.fixed:
            self.script.variables[name] = words

    def expand(self, token: Token, *, split: bool = True) -> list[Word]:
        """Expand a raw word, and return the words that result.

        Args:
            token: the raw word.
            split: whether the value of an unquoted variable is split at blanks.
        """
        words: list[Word] = []
        text, line, open_word = "", token.line, False
        for part, quoted, each_line in self._parts(token):
            if isinstance(part, list):  # an array
                for place, word in enumerate(part):
                    if place or not open_word:
                        if open_word:
                            words.append(Word(text, line))
                        text, open_word = "", True
                    line = word.line if not text else line
                    text += word.text
                continue
            if quoted or not split or not re.search(r"\s", part):
                line = line if open_word else each_line
                text += part
                open_word = open_word or quoted or bool(part)
                continue
            for number, piece in enumerate(part.split("\n")):
                for field_text in re.findall(r"\s+|\S+", piece) + ([" "] if number < part.count("\n") else []):
                    if field_text.isspace():
                        if open_word:
                            words.append(Word(text, line))
                        text, open_word = "", False
                    else:
                        line = line if open_word else each_line + number
                        text += field_text
                        open_word = True
        if open_word or (not split and not words):
            words.append(Word(text, line))
        return words

    def _parts(self, token: Token) -> Iterator[tuple[str | list[Word], bool, int]]:
        """Yield the parts of a raw word: the text (or the words of an array), whether it was quoted, and its line."""
        raw, start, line = token.text, 0, token.line
        while start < len(raw):
            end = _end_of_quoted(raw, start)
            if raw[start] == "'" and end > start:
                yield raw[start + 1 : end - 1], True, line
            elif raw[start] == '"' and end > start:
                yield from self._in_quotes(raw[start + 1 : end - 1], line)
            elif raw[start] == "$" or raw[start] == "`":
                value, end = self._value(raw, start, line)
                if isinstance(value, list):
                    value = [Word(piece, word.line) for word in value for piece in word.text.split()]
                yield (value, False, line) if isinstance(value, list) else (value.text, False, value.line)
            elif raw[start] == "\\":
                end = start + 2
                yield raw[start + 1 : end], True, line
            else:
                match = re.match(r"[^'\"$\\`]+", raw[start:])
                end = start + (len(match[0]) if match else 1)
                yield raw[start:end], True, line
            line += raw.count("\n", start, end)
            start = end

    def _in_quotes(self, text: str, line: int) -> Iterator[tuple[str | list[Word], bool, int]]:
        start = 0
        yield "", True, line
        while start < len(text):
            if text[start] in "$`":
                value, end = self._value(text, start, line)
                yield (value, True, line) if isinstance(value, list) else (value.text, True, line)
            elif text[start] == "\\" and start + 1 < len(text):
                end = start + 2
                escaped = text[start + 1] in '"$`\\\n'
                yield ("\n" if text[start + 1] == "\n" else text[start + 1]) if escaped else text[start:end], True, line
            else:
                match = re.match(r"[^$\\`]+", text[start:])
                end = start + (len(match[0]) if match else 1)
                yield text[start:end], True, line
            line += text.count("\n", start, end)
            start = end

    def _value(self, text: str, start: int, line: int) -> tuple[Word | list[Word], int]:
        """Return the value of a substitution, and its end in the text."""
        end = _end_of_quoted(text, start)
        if text.startswith("$((", start):
            return Word(self._arithmetic(text[start + 3 : end - 2]), line), end
        if text.startswith("${", start):
            return self._parameter(text[start + 2 : end - 1], line), end
        if end > start:  # the output of a command, which is not known
            return Word(f"{UNSET}{text[start:end].strip('$`()')}}}".replace(" ", "_"), line), end
        if match := re.match(r"\$([A-Za-z_]\w*|[0-9@*#?])", text[start:]):
            words = self.script.variables.get(match[1])
            return words[0] if words else Word(f"{UNSET}{match[1]}}}", line), start + len(match[0])
        return Word("$", line), start + 1

    def _parameter(self, inner: str, line: int) -> Word | list[Word]:
        match = re.fullmatch(r"(#?)([A-Za-z_]\w*|[0-9@])(?:\[([@*]|\d+)\])?(?:(:?[-=+?])(.*)|(.*))", inner, re.DOTALL)
        if match is None:
            return Word(f"{UNSET}{inner}}}", line)
        counts, name, index, operation, other, rest = match.groups()
        words = self.script.variables.get(name)
        if counts:
            return Word(str(len(words or [])), line)
        if operation in (":-", "-", ":=", "="):
            if words and (words[0].text or ":" not in operation):
                return words[0]
            value = "".join(word.text for word in self.expand(Token(other, line), split=False))
            return Word(value, line)
        if operation in (":+", "+"):
            return self.expand(Token(other, line), split=False)[0] if words and words[0].text else Word("", line)
        if rest and words:  # the end or the begin is cut off, or a part is replaced
            return Word(_changed(words[0].text, rest) or f"{UNSET}{inner}}}", line)
        if index == "*" and words is not None:
            return Word(" ".join(word.text for word in words), line)
        if index == "@":
            return list(words) if words is not None else [Word(f"{UNSET}{name}}}", line)]
        if words is None:
            return Word(f"{UNSET}{name}}}", line)
        place = int(index or 0)
        return words[place] if place < len(words) else Word("", line)

    def _arithmetic(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            words = self.script.variables.get(match[1])
            return words[0].text if words else "?"

        expanded = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", value, text).strip()
        try:
            return str(_calculate(ast.parse(expanded, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return f"{UNSET}({text.strip()})}}"


def _changed(value: str, change: str) -> str:
    """Return the value of ${A%B}, ${A##B} and ${A//B/C} for patterns without wildcards ("": any other change)."""
    if match := re.fullmatch(r"%%?([^*?]+)", change):
        return value.removesuffix(match[1])
    if match := re.fullmatch(r"##?([^*?]+)", change):
        return value.removeprefix(match[1])
    if match := re.fullmatch(r"//?([^*?/]+)/([^/]*)", change):
        return value.replace(match[1], match[2])
    return ""


_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **dict.fromkeys((ast.Div, ast.FloorDiv), lambda one, other: one // other),
    ast.Mod: operator.mod,
}


def _calculate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculate(node.operand)
    if isinstance(node, ast.BinOp) and (operation := _OPERATIONS.get(type(node.op))):
        return operation(_calculate(node.left), _calculate(node.right))
    raise ValueError(ast.unparse(node))


def _compare(words: Sequence[str]) -> bool | None:
    """Return whether a test with these words holds (None: a word is not known)."""
    if len(words) == 2 and words[0] in ("-z", "-n"):
        unset = re.fullmatch(r"\$\{\w+\}", words[1]) is not None
        return None if unset or UNSET in words[1] else (not words[1]) == (words[0] == "-z")
    if len(words) == 1 and words[0] in ("-z", "-n"):
        return words[0] == "-z"
    if any(UNSET in word for word in words) or len(words) != 3:
        return None
    first, test, second = words
    if test in ("==", "="):
        return fnmatchcase(first, second)
    if test == "!=":
        return not fnmatchcase(first, second)
    tests: dict[str, Callable[[int, int], bool]] = {
        **{"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt},
        **{"-ge": operator.ge, "-lt": operator.lt, "-le": operator.le},
    }
    if test not in tests or not re.fullmatch(r"-?\d+", first) or not re.fullmatch(r"-?\d+", second):
        return None
    return tests[test](int(first), int(second))


FLAG = re.compile(r"--?[A-Za-z][\w.:-]*(=.*)?", re.DOTALL)


def flags_of(words: Sequence[Word]) -> list[Setting]:
    """Return flags with their values and lines. True stands for a flag without a value, a list for several values.

    >>> [tuple(each) for each in flags_of([Word("--tp", 1), Word("2", 1), Word("--bf16", 2), Word("--lr=1e-4", 3)])]
    [('--tp', '2', 1), ('--bf16', True, 2), ('--lr', '1e-4', 3)]
    """
    settings: list[Setting] = []
    values: list[str] = []
    name, line = "", 0

    def close() -> None:
        if name:
            settings.append(Setting(name, values[0] if len(values) == 1 else list(values) if values else True, line))

    for word in words:
        if FLAG.fullmatch(word.text):
            close()
            name, equals, value = word.text.partition("=")
            values, line = [value] if equals else [], word.line
        elif name:
            values.append(word.text)
    close()
    return settings
