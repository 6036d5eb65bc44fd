"""Commands whose modules are imported when they are run or explained.

A list of commands is made without them: what it says of each is the first line of its docstring,
read from the source.
"""

import ast
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class Lazy(TyperCommand):
    """The command that is a function of a module.

    Args:
        module: Of this package; or a whole name, of a room that adds commands of its own.
        function: Its name is the command's.
        example: A call of it, as its help ends.
    """

    def __init__(self, module: str, function: str, example: str) -> None:
        super().__init__(function, rich_markup_mode=None)
        self.module = module if "." in module else f"{__package__}.{module}"
        self.function, self.example = function, example

    @cached_property
    def loaded(self) -> Any:
        """The command itself."""
        found = getattr(import_module(self.module), self.function)
        around = typer.Typer(rich_markup_mode=None)
        around.command(self.name, epilog=f"Example: coda-agent {self.example}")(found)
        return typer.main.get_group(around).commands[str(self.name)]

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **settings: Any
    ) -> Any:
        return self.loaded.make_context(info_name, args, parent, **settings)

    def get_short_help_str(self, limit: int = 45) -> str:
        said = TyperCommand(self.name, help=_docstrings(self.module).get(self.function))
        return said.get_short_help_str(limit)


def group(name: str, help: str, *commands: Lazy) -> TyperGroup:
    """Make a command of commands."""
    about: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None}
    return TyperGroup(name=name, help=help, commands=commands, **about)


@cache
def _docstrings(module: str) -> dict[str, str | None]:
    where = find_spec(module)  # it imports the room, and not the module
    source = Path(str(where and where.origin)).read_text("utf-8")
    found = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return {node.name: ast.get_docstring(node) for node in found}
