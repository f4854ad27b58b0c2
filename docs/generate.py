"""Writes docs/configuration.md from the code: ``python docs/generate.py``."""

import inspect
import types
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docstring_parser import parse

from daf_core import DAFConfig, ElasticConfig, errors

PAGE = Path(__file__).parent / "configuration.md"

HEAD = """# Configuration

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


def page() -> str:
    """Returns the text of the page."""
    return "\n".join([HEAD, *_options("## Options", DAFConfig), *_options("## `elastic`", ElasticConfig), *_errors()])


def _options(title: str, config: type[Any]) -> list[str]:
    hints = get_type_hints(config)
    said = {each.arg_name: each.description for each in parse(config.__doc__ or "").params}
    rows = [
        f"| `{field.name}` | {_allowed(hints[field.name])} | `{field.default!r}` | {_line(said[field.name])} |"
        for field in fields(config)
    ]
    return [title, "", "| option | values | default | meaning |", "|---|---|---|---|", *rows, ""]


def _errors() -> list[str]:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.DAFError)]
    rows = [f"| `{kind.__name__}` | {_line((kind.__doc__ or '').split(chr(10) * 2)[0])} |" for kind in kinds]
    return ["## Errors", "", "All are `daf_core.DAFError`.", "", "| error | says |", "|---|---|", *rows, ""]


def _allowed(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return ", ".join(dict.fromkeys(_allowed(each) for each in get_args(hint)))
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value!r}`" for value in get_args(hint))
    names = {int: "integer", float: "number", str: "text", type(None): "`None`"}
    return names.get(hint) or f"`{hint.__name__}`"


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page())
