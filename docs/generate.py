"""Writes pages, and parts of pages, from the code: ``python docs/generate.py``."""

import ast
import importlib
import inspect
import itertools
import types
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click
from docstring_parser import parse

from daf_core import DAFConfig, ElasticConfig, errors
from daf_core.readers import table
from daf_integrations.cli.main import main
from daf_integrations.session.metrics import METRICS

FOLDER = Path(__file__).parent

READERS_BEGIN = "<!-- Written by docs/generate.py from daf_core/readers/table.py: -->"
READERS_END = "<!-- until here. -->"

CONFIGURATION_HEAD = """# Configuration

All options of DAF, as the code documents them (`python docs/generate.py` writes this page). They are the fields of
`daf_core.DAFConfig`, and are given in any of these ways:

```python
DAFCallback(precision=4, elastic={"time": 0.6})  # arguments, in every integration
DAFCallback(DAFConfig(precision=4))  # one object
DAFConfig.from_yaml("daf.yaml")  # a file whose top level is the mapping of options
```

```yaml
daf_config:            # a section of the file that `accelerate launch --config_file` is given
  precision: 4
  elastic: {time: 0.6}
```

`ACCELERATE_USE_DAF=1` with `ACCELERATE_DAF_CONFIG='{"precision": 4}'` in the environment does the same without a file.
Arguments go before the environment, and the environment before the file. An unknown option, or a value that is not
allowed, is a `ConfigError` before training.
"""


COMMANDS_HEAD = """# Commands

The commands, as the code documents them (`python docs/generate.py` writes this page). `daf --version` prints the
version of the distribution `daf-training`.
"""

FIGURES_HEAD = """# Figures in the log, and variables of the environment

Both as the code documents them (`python docs/generate.py` writes this page).

## Figures in the log

A figure counts the steps since the line before: sizes are those of the largest step, and times are a mean.
"""

PYTHON_HEAD = """# Python names

The public names, as the code documents them (`python docs/generate.py` writes this page).
[configuration.md](configuration.md) has the options of training, and the errors. In Python, `help(prepare)` says more.
"""

ENVIRONMENT = {
    "ACCELERATE_USE_DAF": "1 switches DAF on in Accelerate, and has `DAFCallback`, `DAFStrategy` and `prepare` read "
    "the options below; 0 switches the section `daf_config` of Accelerate's file off.",
    "ACCELERATE_DAF_CONFIG": 'Options as a JSON object, such as `{"precision": 4}`.',
    "DAF_AUTOLOAD": "0 leaves out the hooks that `import torch` installs for Accelerate's file and Lightning's "
    '`strategy="daf"`. Torch\'s own `TORCH_DEVICE_BACKEND_AUTOLOAD` does so too.',
    "XDG_CACHE_HOME": "Where `daf/kernel_choices.json` is, with the kernels that were the fastest on a GPU; default "
    "`~/.cache`.",
    "LOCAL_WORLD_SIZE": "Set by `torchrun` and its like: processes that share the cores, of which DAF takes an idle "
    "one to pack.",
    "MALLOC_MMAP_THRESHOLD_": "Of glibc: blocks of so many bytes go back to the system when they are freed "
    "([troubleshooting](../guides/troubleshooting.md#memory-allocators)); `daf doctor` looks whether it is set.",
    "LD_PRELOAD": "`daf run` and `daf bench` load tcmalloc or mimalloc with it, where one is installed and no "
    "allocator is named.",
    "CONDA_PREFIX": "Set by conda: `daf doctor` then says what to type there.",
}
"""What code of DAF reads from the environment."""

MEMBERS = (types.FunctionType, classmethod, staticmethod, property)

MODULES = (
    "daf_integrations",
    "daf_integrations.lightning",
    "daf_integrations.pytorch_lightning",
    "daf_integrations.accelerate",
    "daf_core",
    "daf_kernels",
)
"""What users import, or run with ``-m``."""


def configuration() -> str:
    """Returns the text of the page on options."""
    options = [*_options("## Options", DAFConfig), *_options("## `elastic`", ElasticConfig)]
    return "\n".join([CONFIGURATION_HEAD, *options, *_errors()])


def commands() -> str:
    """Returns the text of the page on commands."""
    return "\n".join(
        [COMMANDS_HEAD, *(line for name in main.list_commands(click.Context(main)) for line in _command(name))]
    )


def figures() -> str:
    """Returns the text of the page on figures in the log, and on variables of the environment."""
    logged = [f"| `{name}` | {metric.meaning} |" for name, metric in METRICS.items()]
    variables = [f"| `{name}` | {said} |" for name, said in ENVIRONMENT.items()]
    environment = ["## Environment", "", *_table(("variable", "meaning"), variables)]
    return "\n".join([FIGURES_HEAD, *_table(("figure", "meaning"), logged), *environment])


def python_names() -> str:
    """Returns the text of the page on what users import."""
    return "\n".join([PYTHON_HEAD, *(line for name in MODULES for line in _module(name))])


def meaning(module: types.ModuleType, name: str) -> str:
    """Returns the first paragraph of what the code says of a name of a module; "" if it says nothing."""
    value = getattr(module, name)
    if inspect.isclass(value) or inspect.isroutine(inspect.unwrap(value)):
        return _first_paragraph(value.__doc__)
    return _first_paragraph(_said_below(Path(inspect.getfile(module)).parent, name))


def _said_below(folder: Path, name: str) -> str:
    """Returns the text under the assignment of a constant, in any file of a folder."""
    for file in sorted(folder.glob("*.py")):
        body = ast.parse(file.read_text()).body
        for line, below in itertools.pairwise(body):
            assigned = isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == name
            if assigned and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                return str(below.value.value)
    return ""


def _command(name: str) -> list[str]:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    arguments = [each.human_readable_name for each in command.params if isinstance(each, click.Argument)]
    rows = [_option(each) for each in command.params if isinstance(each, click.Option)]
    paragraphs = [_line(paragraph) for paragraph in inspect.cleandoc(command.help or "").split("\n\n")]
    return [
        *(f"## `{' '.join(['daf', name, *arguments])}`", ""),
        *(line for paragraph in paragraphs for line in (paragraph, "")),
        *_table(("option", "values", "default", "meaning"), rows),
    ]


def _option(option: click.Option) -> str:
    names = ", ".join(f"`{each}`" for each in option.opts)
    said, _, default = (option.help or "").partition("  [default: ")
    default = str(option.default) if option.show_default else default.rstrip("]")
    return f"| {names} | {_values(option)} | {default and f'`{default}`'} | {_line(said)} |"


def _values(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return ", ".join(f"`{choice}`" for choice in option.type.choices)
    if isinstance(option.type, click.IntRange):
        return f"integer, {option.type.min} or more"
    return "" if option.is_flag else f"`{option.metavar or option.type.name.upper()}`"


def _module(name: str) -> list[str]:
    module = importlib.import_module(name)
    public = [each for each in getattr(module, "__all__", ()) if not _is_error(getattr(module, each))]
    rows = [row for each in public for row in _rows(each, getattr(module, each), meaning(module, each))]
    heading = [f"## `{name}`", "", _line(_first_paragraph(module.__doc__)), ""]
    return [*heading, *(_table(("name", "meaning"), rows) if rows else [])]


def _rows(name: str, value: object, said: str) -> list[str]:
    """Returns the row of a name, and those of the members of a class that have something to say."""
    row = f"| `{name}{_arguments(value)}` | {_line(said)} |"
    members = vars(value).items() if inspect.isclass(value) else ()
    return [row] + [
        f"| `{name}.{member}{_arguments(getattr(value, member))}` | {_line(_first_paragraph(each.__doc__))} |"
        for member, each in members
        if not member.startswith("_") and isinstance(each, MEMBERS) and _says_something(each)
    ]


def _is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, errors.DAFError)


def _says_something(member: object) -> bool:
    return bool(member.__doc__) and not member.__doc__.startswith("See ")


def _arguments(value: object) -> str:
    if inspect.isclass(value) or not callable(value) or isinstance(value, types.GenericAlias):
        return ""
    return f"({', '.join(name for name in inspect.signature(value).parameters if name != 'self')})"


def _first_paragraph(text: str | None) -> str:
    return inspect.cleandoc(text or "").split("\n\n")[0]


def _table(titles: Sequence[str], rows: list[str]) -> list[str]:
    return [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), *rows, ""]


def _options(title: str, config: type[Any]) -> list[str]:
    hints = get_type_hints(config)
    said = {each.arg_name: each.description for each in parse(config.__doc__ or "").params}
    rows = [
        f"| `{field.name}` | {_allowed(hints[field.name])} | `{field.default!r}` | {_line(said[field.name])} |"
        for field in fields(config)
    ]
    return [title, "", *_table(("option", "values", "default", "meaning"), rows)]


def _errors() -> list[str]:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.DAFError)]
    rows = [f"| `{kind.__name__}` | {_line(_first_paragraph(kind.__doc__))} |" for kind in kinds]
    return ["## Errors", "", "All are `daf_core.DAFError`.", "", *_table(("error", "says"), rows)]


def _allowed(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return ", ".join(dict.fromkeys(_allowed(each) for each in get_args(hint)))
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value!r}`" for value in get_args(hint))
    names = {int: "integer", float: "number", str: "text", type(None): "`None`"}
    return names.get(hint) or f"`{hint.__name__}`"


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("``", "`")


def numerics() -> str:
    """Returns the page with its table of readers as the code has it."""
    text = (FOLDER / "concepts" / "numerics.md").read_text()
    before, _, rest = text.partition(READERS_BEGIN)
    _, _, after = rest.partition(READERS_END)
    return "\n".join([before + READERS_BEGIN, "", *_readers(), READERS_END + after])


def _readers() -> list[str]:
    rows: list[str] = []
    for kind, places in table.listed().items():
        names: dict[tuple[str, ...], list[str]] = {}
        for node in dict.fromkeys(node for node, _ in places):
            fields_of_node = tuple(field for each, field in places if each == node)
            names.setdefault(fields_of_node, []).append(node.replace("Backward", ""))
        said = [f"{', '.join(nodes)}: *{', '.join(those)}*" for those, nodes in names.items()]
        of_none = "all others" if kind is table.Kind.EXACT else "none by itself: `Mul0` and what has made its factors"
        rows.append(f"| {kind.value} | {'; '.join(said) or of_none} |")
    return _table(("its backward reads", "autograd nodes of torch, and what they have saved"), rows)


PAGES = {
    FOLDER / "reference" / "configuration.md": configuration,
    FOLDER / "reference" / "commands.md": commands,
    FOLDER / "reference" / "figures.md": figures,
    FOLDER / "reference" / "python.md": python_names,
    FOLDER / "concepts" / "numerics.md": numerics,
}

if __name__ == "__main__":
    for file, text in PAGES.items():
        file.write_text(text())
