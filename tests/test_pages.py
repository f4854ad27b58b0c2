"""The pages: every block of code runs, and every command exists."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from unittest import mock

import click
import pytest
import yaml

from daf_core import DAFConfig
from daf_integrations.environment import OPTIONS, SECTION
from daf_integrations.loop import training
from tests.pages.blocks import Block, all_blocks, blocks_of, inline_code, names_for_blocks, versions_of
from tests.pages.commands import DAF, NoCommandError, check, commands_of

BLOCKS = all_blocks()
COMMANDS = ""
"""A fence without a word has commands; what is to be read alone, such as output, has "text"."""

KINDS = {"python", "diff", "yaml", COMMANDS, "text"}


def of_kind(*kinds: str) -> list[object]:
    return [pytest.param(block, id=block.place) for block in BLOCKS if block.kind in kinds]


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {block.place: block.kind for block in BLOCKS if block.kind not in KINDS} == {}
    assert {block.kind for block in BLOCKS} == KINDS


# A Trainer with its defaults pins memory, and says that this machine has no GPU to pin it for.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
# Lightning has opinions on loading eight rows, and on validation.
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
# TRL 1.16 calls by its old name what transformers 5.24 has renamed, and says of its own interface that it will change.
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::FutureWarning:trl")
@pytest.mark.filterwarnings("ignore:The tokenizer has new PAD/BOS/EOS tokens:UserWarning")
@pytest.mark.parametrize("block", of_kind("python", "diff"))
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "_exit_summaries", [])  # what is said of each training when the interpreter ends
    Path("daf.yaml").write_text("precision: 4\n")
    for version in versions_of(block.text) if block.kind == "diff" else [block.text]:
        exec(compile(version, block.place, "exec"), names_for_blocks())


@pytest.mark.parametrize("block", of_kind("yaml"))
def test_yaml_is_a_configuration_that_accelerate_takes(block: Block, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    section = yaml.safe_load(block.text)[SECTION]
    assert DAFConfig.from_dict(section) != DAFConfig()
    file = tmp_path / "daf.yaml"
    file.write_text(f"compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\n{block.text}")
    with mock.patch.dict(os.environ):
        load_config_from_file(str(file))
        assert json.loads(os.environ[OPTIONS]) == section


@pytest.mark.parametrize("block", of_kind(COMMANDS))
def test_commands_exist(block: Block) -> None:
    check(block.text)


def test_commands_in_sentences_exist() -> None:
    said = [code for _, code in inline_code()]
    targets = [code for code in said if code.startswith("make ")]
    assert len(targets) > 5
    for command in targets:
        check(command)
    assert {command for code in said for command in re.findall(r"^daf ([a-z]+)", code)} <= set(DAF)


@pytest.mark.parametrize(
    "command",
    [
        "daf plann gpt2",
        "daf plan gpt2 --budgt 600MB",
        "daf plan gpt2 --budget lots",
        "make tests",
        "make test ARG=-x",
        "python -m benchmarks.budgets --model gpt9",
        "python -m benchmarks.nothing",
        "python -m nothing_of_that_name",
        "python examples/finetune_elastic.py --tim",
        "python examples/nothing.py",
        "accelerate launch --config_file examples/nothing.yaml train.py",
        "accelerate launch examples/finetune_accelerate.py --stepz 3",
        "pip install -e '.[hf,lightening]'",
        "benchmarks/nothing.sh",
        "unheard-of",
        "python train.py && make tests",
    ],
)
def test_commands_that_do_not_work_are_found(command: str) -> None:
    with pytest.raises((NoCommandError, click.ClickException)):
        check(command)


def test_a_command_is_what_is_between_comments_variables_and_pipes() -> None:
    text = "A=1 python \\\n  -m x 'a # b'  # comment\nB=2 . c && d | e\n# only a comment\n"
    assert list(commands_of(text)) == [["python", "-m", "x", "a # b"], [".", "c"], ["d"], ["e"]]


def test_both_versions_of_a_difference_are_seen() -> None:
    assert versions_of("-a\n+b\n c\n") == ["a\nc", "b\nc"]


def test_blocks_without_a_fence_are_seen() -> None:
    assert [block.kind for block in blocks_of("text\n\n    code\n\n- item\n\n  ```new\n  code\n  ```\n", "page")] == [
        "indented",
        "new",
    ]
