"""The documentation: every command parses, every file and section named exists. benchmarks/run_docs.py runs the commands."""

from __future__ import annotations

import ast
import re
import shlex
from itertools import pairwise
from pathlib import Path

import click
import pytest
import run_docs

from gplan.cli.verbs import VERBS, cli
from gplan.files import json_files

COMMANDS = {name: command for name in VERBS if (command := cli.get_command(click.Context(cli), name))}
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
REPORT_PAGES = sorted((ROOT / "reports").glob("*/README.md"))
MESSAGES_OF_OTHERS = {  # of torch and click, or with names that the code puts in
    "Expected inputs of BF16 type",
    "missing option …",
    "invalid value for …",
    "no such command …",
    "there is neither gplan.run.json nor gplan.plan.json here",
}
OTHER_OPTIONS = {  # of click, torchrun, Slurm and Megatron-LM
    "--help", "--hybrid-layer-pattern", "--master-port", "--node-rank", "--nodes", "--nproc-per-node", "--pipeline-model-parallel-layout",
    "--profile-ranks", "--rdzv-backend", "--use-pytorch-profiler",
}  # fmt: skip


def commands_of(path: Path) -> set[str]:
    """The gplan commands of a page: those in code blocks, and those with arguments within a sentence."""
    blocks = (
        [x for block in run_docs.blocks_of(path.stem) for x in block.commands] if path.stem in run_docs.ORDER else []
    )
    named = re.findall(r"`(gplan [a-z][^`]*)`", prose_of(path))
    lines = [re.split(r"\s{3,}| #", x)[0] for x in blocks]  # without what the overview says of a verb
    return {x for x in [*lines, *(" ".join(x.split()) for x in named)] if "gplan" in x.split()}


def prose_of(path: Path) -> str:
    """The text of a page without its code blocks."""
    return re.sub(r"```.*?```|^    .*?$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", PAGES, ids=lambda x: x.stem)
def test_commands_parse(path: Path) -> None:
    found = commands_of(path)
    assert found or path.stem not in run_docs.ORDER
    for command in found:
        words = shlex.split(command)
        name, *arguments = words[words.index("gplan") + 1 :]
        assert name in COMMANDS, f"gplan has no verb {name}: {command}"
        verb = COMMANDS[name]
        if any(
            arguments[-1:] == [x]
            for option in verb.params
            if not getattr(option, "is_flag", False)
            for x in option.opts
        ):
            arguments.append("VALUE")  # a sentence names the option alone
        try:
            verb.make_parser(click.Context(verb, info_name=name)).parse_args(arguments)
        except click.UsageError as error:
            raise AssertionError(f"{command}: {error.message}") from error


@pytest.mark.parametrize("path", PAGES, ids=lambda x: x.stem)
def test_options_exist(path: Path) -> None:
    known = {name for verb in COMMANDS.values() for x in verb.params for name in x.opts}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", prose_of(path))) <= known | OTHER_OPTIONS


@pytest.mark.parametrize("path", [*PAGES, *REPORT_PAGES], ids=lambda x: str(x.relative_to(ROOT)))
def test_links_resolve(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(path)):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{link} is not there"
        assert not anchor or anchor in anchors_of(target), f"{link}: the page has no such section"


def anchors_of(path: Path) -> set[str]:
    """The names that links to the sections of a page have."""
    titles = re.findall(r"^#+ (.*)", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda x: x.stem)
def test_files_named_exist(path: Path) -> None:
    folders = "gplan|gplan_profiler|examples|benchmarks|notebooks|tests|docs|reports"
    names = re.findall(rf"\b(?:{folders})/[\w./-]*\w", path.read_text())
    assert [x for x in names if not (ROOT / x).exists() and not (ROOT / "profiler" / x).exists()] == []


def test_python_blocks_compile() -> None:
    blocks = [x for page in run_docs.ORDER for x in run_docs.blocks_of(page) if x.language == "python"]
    assert len(blocks) >= 5
    for block in blocks:
        compile(block.text, block.page, "exec")


@pytest.mark.parametrize(("name", "most_lines"), [("README.md", 110), ("ARCHITECTURE.md", 150)])
def test_pages_are_short(name: str, most_lines: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most_lines


def test_file_formats_are_current() -> None:
    text = (ROOT / "docs" / "files-and-python.md").read_text()
    assert set(re.findall(r"gplan\.\w+/\d+", text)) == set(json_files.FORMATS.values())


def texts_of_sources() -> str:
    """Every string of the packages, with "…" for what an f-string puts in."""
    found = list[str]()
    for path in [*ROOT.glob("gplan/**/*.py"), *ROOT.glob("profiler/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(x.value) if isinstance(x, ast.Constant) else "…" for x in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found).replace("`", "")  # a message in a table has no quotes of its own


def test_messages_exist() -> None:
    """Most pairs of words of each message in the tables of troubleshooting are in some message of the code."""
    sources, missing = texts_of_sources(), list[str]()
    for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines():
        for message in re.findall(r"`([^`]+)`", line.split(" | ")[0]) if line.startswith("| `") else ():
            pairs = [" ".join(x) for part in message.split("…") for x in pairwise(part.split())]
            if pairs and sum(x in sources for x in pairs) < 0.6 * len(pairs):
                missing.append(message)
    assert set(missing) <= MESSAGES_OF_OTHERS
