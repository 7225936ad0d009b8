"""Read torchtitan's configurations in Python: functions that return a `Trainer.Config`.

The code is not run. `read_python` parses it, and follows assignments, arithmetic with numbers, and calls of functions
of the same file and of torchtitan's registry. A setting whose expression it cannot follow has no value (`UNSET`), and a
prediction asks for one. A statement that it cannot follow becomes a note.

Source: pytorch/torchtitan at b5bcd76c66d0acb1a08b176d9639425bc55e0b2a, torchtitan/config/README.md and
models/llama3/config_registry.py; release 0.3.0 has the same form.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from shardlab.common.errors import UserError
from shardlab.frameworks.settings import UNSET, Setting
from shardlab.frameworks.torchtitan import registry_settings
from shardlab.models.from_config import listed

RECOMPUTATION = {
    "FullAC": {"activation_checkpoint.mode": "full"},
    "SelectiveAC": {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"},
    "MemoryBudgetAC": {"activation_checkpoint.mode": "memory_budget"},
}
"""Keys of TOML files with their values, by class of recomputation (torchtitan/distributed/activation_checkpoint.py)."""

CONFIG_CLASS = "Trainer.Config"

_NUMBERS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: left // right,
}


class Call(NamedTuple):
    """Call of a function or a class whose result is not a configuration.

    Attributes:
        name: name of what is called, such as "TrainingConfig" or "FullAC.Config".
        arguments: positional arguments.
        fields: arguments by name, with their lines.
    """

    name: str
    arguments: tuple[Any, ...]
    fields: Mapping[str, tuple[Any, int]]


class PythonConfig(NamedTuple):
    """Settings of a configuration in Python.

    Attributes:
        settings: settings under the keys of TOML files, each with its line.
        notes: lines that were not followed.
    """

    settings: tuple[Setting, ...]
    notes: tuple[str, ...]


def read_python(text: str, file: str, name: str | None = None) -> PythonConfig:
    """Return the settings of a function that makes a configuration.

    Args:
        text: the code.
        file: name of the file, for messages.
        name: name of the function (None: the only one).

    Raises:
        UserError: if the text is no Python, has no such function, or has several and no name is given.
    """
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        location = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
        raise UserError(f"{file} is no Python: {location}{getattr(error, 'msg', error)}") from None
    try:
        return _read_module(module, file, name)
    except RecursionError:
        raise UserError(f"{file} is nested too deeply to be followed; write its values plainly") from None


def _read_module(module: ast.Module, file: str, name: str | None) -> PythonConfig:
    reader = _Reader(file, module)
    makers = [function for function in reader.functions if reader.makes_config(function)]
    if not makers:
        raise UserError(
            f"{file} has no function that returns a {CONFIG_CLASS} of torchtitan; name a file with one, or a TOML"
        )
    if name is not None and name not in makers:
        raise UserError(f"{file} has no configuration {name!r}; it has {listed(makers)}")
    if name is None and len(makers) > 1:
        raise UserError(
            f"{file} has {len(makers)} configurations; give one of them after --, as in: --config {makers[0]}"
        )
    settings = reader.settings_of(name or makers[0])
    return PythonConfig(tuple(settings), tuple(reader.notes))


class _Unread:
    """Expression that is not followed."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return f"{UNSET}{self.text}}}"


class _Reader:
    """Reader of the functions of one module."""

    def __init__(self, file: str, module: ast.Module) -> None:
        self._file = file
        self.functions = {function.name: function for function in module.body if isinstance(function, ast.FunctionDef)}
        self.notes: list[str] = []
        self._globals: dict[str, Any] = {}
        self._family = ""
        self._reading: list[str] = []
        for statement in module.body:
            if isinstance(statement, ast.ImportFrom):
                match = re.search(r"models\.(\w+)", statement.module or "")
                if match and match[1] != "common":
                    self._family = match[1]
            elif isinstance(statement, ast.Assign):
                self._assign(statement, self._globals)

    def makes_config(self, name: str) -> bool:
        """Return whether a function has no arguments and returns a configuration, as its annotation or code says."""
        function = self.functions[name]
        if function.args.args or function.args.kwonlyargs or name.startswith("_"):
            return False
        if function.returns is not None:
            return ast.unparse(function.returns).strip("'\"").endswith(CONFIG_CLASS)
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        return any(ast.unparse(node.func).endswith(CONFIG_CLASS) for node in calls)

    def settings_of(self, name: str) -> list[Setting]:
        """Return the settings that a function returns.

        Raises:
            UserError: if it returns something else, or calls itself.
        """
        if name in self._reading:
            raise UserError(f"{self._file}: {name} calls itself")
        self._reading.append(name)
        scope = dict(self._globals)
        result: Any = None
        for statement in self.functions[name].body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                result = self._value(statement.value, scope)
                break
            self._follow(statement, scope)
        self._reading.pop()
        if not isinstance(result, list) or not all(isinstance(setting, Setting) for setting in cast(list[Any], result)):
            raise UserError(
                f"{self._file}: what {name} returns is not followed; return a {CONFIG_CLASS}, or a variable with one"
            )
        return cast(list[Setting], result)

    def _follow(self, statement: ast.stmt, scope: dict[str, Any]) -> None:
        harmless = ast.Import | ast.ImportFrom | ast.Assert | ast.Pass | ast.FunctionDef
        if isinstance(statement, ast.Assign):
            self._assign(statement, scope)
        elif not isinstance(statement, harmless) and not (
            isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        ):
            first = ast.unparse(statement).splitlines()[0]
            self.notes.append(f"line {statement.lineno} is not followed: {first}")

    def _assign(self, statement: ast.Assign, scope: dict[str, Any]) -> None:
        value = self._value(statement.value, scope)
        for target in statement.targets:
            names = ast.unparse(target).split(".")
            if isinstance(target, ast.Name):
                scope[target.id] = value
            elif isinstance(target, ast.Attribute) and isinstance(scope.get(names[0]), list):
                scope[names[0]] += self._field(".".join(names[1:]), value, statement.lineno)
            else:
                self.notes.append(f"line {statement.lineno} is not followed: {ast.unparse(statement)}")

    def _value(self, node: ast.expr, scope: Mapping[str, Any]) -> Any:
        """Return what an expression evaluates to.

        This is a list of settings for a configuration, a `Call` for any other call, a constant or a list of values, or
        `_Unread` if the expression is not followed.
        """
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self._value(element, scope) for element in node.elts]
        if isinstance(node, ast.Name) and node.id in scope:
            value = scope[node.id]
            return [*value] if isinstance(value, list) else value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand, scope)
            return -value if isinstance(value, int | float) else _Unread(ast.unparse(node))
        if isinstance(node, ast.BinOp):
            first, second = self._value(node.left, scope), self._value(node.right, scope)
            apply = _NUMBERS.get(type(node.op))
            if apply is not None and isinstance(first, int | float) and isinstance(second, int | float):
                try:
                    return apply(first, second)
                except (ArithmeticError, ValueError):
                    return _Unread(ast.unparse(node))
        return self._call_value(node, scope) if isinstance(node, ast.Call) else _Unread(ast.unparse(node))

    def _call_value(self, node: ast.Call, scope: Mapping[str, Any]) -> Any:
        name = ast.unparse(node.func)
        if name in self.functions and self.makes_config(name):
            return self.settings_of(name)
        fields = {
            keyword.arg: (self._value(keyword.value, scope), keyword.value.lineno)
            for keyword in node.keywords
            if keyword.arg is not None
        }
        if name.endswith(CONFIG_CLASS):
            settings = [setting for key, (value, line) in fields.items() for setting in self._field(key, value, line)]
            recomputed = any(setting.key == "activation_checkpoint.mode" for setting in settings)
            default = RECOMPUTATION["SelectiveAC"] if not recomputed else {}  # trainer.py: the class's default
            return [*(Setting(key, value, node.lineno) for key, value in default.items()), *settings]
        if not node.args and not fields and (match := re.fullmatch(r"(llama3|qwen3|deepseek_v3|gpt_oss)_\w+", name)):
            return [setting._replace(line=node.lineno) for setting in registry_settings(match[1], name)]
        return Call(name, tuple(self._value(argument, scope) for argument in node.args), fields)

    def _field(self, key: str, value: Any, line: int) -> list[Setting]:
        """Return the settings of a field of the configuration."""
        if key == "model_spec":
            return self._model(value, line)
        if key == "loss":
            return [Setting("loss.class", value.name.removesuffix(".Config") if isinstance(value, Call) else "", line)]
        if key == "activation_checkpoint" and (value is None or isinstance(value, Call)):
            kind = "" if value is None else value.name.removesuffix(".Config")
            if value is None or kind in RECOMPUTATION:
                defaults = RECOMPUTATION.get(kind, {"activation_checkpoint.mode": "none"})
                fields = {} if value is None else {f"{key}.{name}": item for name, (item, _) in value.fields.items()}
                return [Setting(name, item, line) for name, item in (defaults | fields).items()]
        if not isinstance(value, Call):
            return [Setting(key, str(value) if isinstance(value, _Unread) else value, line)]
        if value.name == "default_adamw":
            return [Setting("optimizer.name", "AdamW", line)]
        if not value.name.rpartition(".")[2][:1].isupper():  # a function, whose result is not known
            return [Setting(key, f"{UNSET}{value.name}(...)}}", line)]
        return [
            setting
            for name, (inner, inner_line) in value.fields.items()
            for setting in self._field(f"{key}.{name}", inner, inner_line)
        ]

    def _model(self, value: Any, line: int) -> list[Setting]:
        if not isinstance(value, Call) or not value.name.endswith("model_registry"):
            return [Setting("model.flavor", f"{UNSET}model_spec}}", line)]
        flavor = value.arguments[0] if value.arguments else value.fields.get("flavor", ("", line))[0]
        settings = [Setting("model.name", self._family or "llama3", line), Setting("model.flavor", str(flavor), line)]
        converters, converters_line = value.fields.get("converters", ([], line))
        names = [converter.name.partition(".")[0] for converter in converters if isinstance(converter, Call)]
        return [*settings, Setting("model.converters", [name.lower() for name in names], converters_line)]
