"""Write the reference and the man pages: `python docs/reference/generate.py [DIRECTORY]`.

A test compares the pages with what this script would write.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml

import clusterrun
from clusterrun import runtime
from clusterrun.cli.main import EXAMPLES, EXIT_CODES, VERBS, group
from clusterrun.cli.shared.closing import RETRIES
from clusterrun.cli.shared.help import GroupedCommand
from clusterrun.config.fields import Field, Kind
from clusterrun.config.spec import FIELDS
from clusterrun.diagnosis.table import CAUSES, GENERATED, built_in, generated
from clusterrun.health.node import pages as check_pages
from clusterrun.linting.rule import rules
from clusterrun.verbs.doctor import places

HERE = Path(__file__).parent
VALUES = {
    Kind.TEXT: "text",
    Kind.PATH: "path",
    Kind.COUNT: "integer, 1 or more",
    Kind.NUMBER: "integer, 0 or more",
    Kind.REAL: "number above 0",
    Kind.FLAG: "true or false",
    Kind.ENUM: "one of the words",
    Kind.TEXTS: "list of texts",
    Kind.MAPPING: "mapping of names to texts",
    Kind.MINUTES: "time",
    Kind.SECONDS: "duration",
    Kind.DURATION: "duration, or 0",
    Kind.BYTES: "size",
}
NOTICE = "<!-- Written by docs/reference/generate.py: change the code, then run it. -->"

ROFF = str.maketrans(
    {"\\": r"\e", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "~": r"\(ti", "^": r"\(ha", "\f": ""}
)


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {
        "commands.md": "\n".join(_commands()),
        "settings.md": "\n".join(_settings()),
        "python.md": "\n".join(_python()),
        "json.md": "\n".join(_json()),
        "causes.md": "\n".join(_causes()),
        "checks.md": "\n".join(_checks()),
    }


def man_pages() -> dict[str, str]:
    """Return the text of each man page by its file name."""
    verbs = {f"clusterrun-{name}.1": "\n".join(_man_verb(name)) for name in VERBS}
    return {"clusterrun.1": "\n".join(_man_group()), **verbs}


def _man_group() -> Iterator[str]:
    yield _man_head("clusterrun", group.help or "")
    yield from _man_command("clusterrun", group)
    for heading in dict.fromkeys(verb.heading for verb in VERBS.values()):
        yield f".SH {heading.upper()}"
        for name, verb in VERBS.items():
            if verb.heading == heading:
                yield f".TP\n.BR clusterrun\\-{name} (1)\n{_roff(verb.summary)}"
    codes = re.sub(r"^(\d+) {2,}", r".TP\n.B \1\n", EXIT_CODES.strip(), flags=re.MULTILINE)
    yield ".SH EXIT STATUS\n" + re.sub(r"\n\n", "\n.PP\n", codes).replace("--", r"\-\-")
    yield f".SH EXAMPLES\n{_man_prose(EXAMPLES)}\n"


def _man_verb(name: str) -> Iterator[str]:
    yield _man_head(f"clusterrun-{name}", VERBS[name].summary)
    yield from _man_command(f"clusterrun {name}", _find(name))
    yield ".SH SEE ALSO\n.BR clusterrun (1)\n"


def _man_head(page: str, summary: str) -> str:
    what = summary[0].lower() + summary[1:].rstrip(".")
    title = f'.TH {page.upper()} 1 "" clusterrun "clusterrun manual"\n.nh\n.ad l'
    return f"{title}\n.SH NAME\n{page} \\- {_roff(what)}"


def _man_command(path: str, command: click.Command) -> Iterator[str]:
    ctx = click.Context(command, info_name=path)
    is_grouped = isinstance(command, GroupedCommand)
    yield f".SH SYNOPSIS\n.B {path}\n{_roff(' '.join(command.collect_usage_pieces(ctx)))}"
    yield f".SH DESCRIPTION\n{_man_prose(command.help or '')}\n.SH OPTIONS"
    if is_grouped and command.unlisted:
        yield "The options of a job are those of\n.BR clusterrun\\-submit (1)."
    by_heading: dict[str, list[click.Option]] = {}
    for option in _options(command, ctx):
        by_heading.setdefault(getattr(option, "heading", "Output"), []).append(option)
    for heading, options in by_heading.items():
        yield from [f".SS {heading}"] if len(by_heading) > 1 else []
        for option in options:
            yield f".TP\n.B {_roff(_spelling(option, ctx))}"
            yield _roff(" ".join((option.help or "").split()))
    if isinstance(command, click.Group) and command is not group:
        for name, below in command.commands.items():
            yield from _man_command(f"{path} {name}", below)


def _man_prose(text: str) -> str:
    """Return a docstring as roff: click keeps some lines, and each has what it does below it."""
    parts = inspect.cleandoc(text).split("\n\n")
    for n, part in enumerate(parts):
        kept = part.startswith("\b")
        lines = re.sub(r"(?<=\S) {2,}(?=[a-z])", "\n    ", part[2:].strip()) if kept else part
        parts[n] = f".nf\n{_roff(lines)}\n.fi" if kept else _roff(part)
    return "\n.PP\n".join(parts)


def _roff(text: str) -> str:
    """Escape what roff would read as a request."""
    return re.sub(r"^\.", r"\\&.", text.translate(ROFF), flags=re.MULTILINE)


def _causes() -> Iterator[str]:
    yield f"{NOTICE}\n# Causes\n"
    yield "`clusterrun diagnose` knows these causes. `clusterrun explain ID` lists the signs.\n"
    for cause in sorted(built_in().values(), key=lambda each: each.id):
        if cause.means:
            yield f"## {cause.id}\n\n{cause.means} {RETRIES[cause.retry].capitalize()}.\n"
            yield from (f"- {text}" for text in cause.do)
            yield ""


def _checks() -> Iterator[str]:
    known = check_pages()
    yield f"{NOTICE}\n# Checks\n"
    yield "[`clusterrun doctor`](../doctor.md) has these checks. `clusterrun explain ID` shows one."
    yield "\n| check | looks at |\n|---|---|"
    for name, page in known.items():
        yield f"| [{name}](#{name.replace('.', '')}) | {_cell(page.looks_at)} |"
    for name, page in known.items():
        yield f"\n## {name}\n\nLooks at {page.looks_at}.\n".replace("*", r"\*")
        results = {"FAIL": page.fails, "note": page.notes}
        yield from (f"- **{word}** if {text}." for word, text in results.items() if text)
        yield f"- Then: {page.why}".replace("*", r"\*")
        yield from (f"- Fix: {text}".replace("*", r"\*") for text in page.fix)
        yield from (f"- Runs on {text}." for text in places(name))
    check = "[`clusterrun check`](../doctor.md#pitfalls-of-a-script)"
    yield f"\n# Rules\n\n{check} applies these rules to a script and its launch."
    for rule in rules().values():
        yield f"\n## {rule.id}\n\n- Then: {rule.reason}.\n- Fix: {rule.fix}"


def _commands() -> Iterator[str]:
    yield f"{NOTICE}\n# Commands\n"
    yield "`-h` or `--help` prints the common options of a command, `--help-all` prints all."
    yield "`man clusterrun-submit` shows all options of `submit`; each command has such a page.\n"
    yield "| command | what it does |\n|---|---|"
    for name, verb in VERBS.items():
        yield f"| [{name}](#clusterrun-{name}) | {_cell(verb.summary)} |"
    for name in VERBS:
        yield from _command(f"clusterrun {name}", _find(name))
    yield f"\n## Exit status\n\n```\n{EXIT_CODES.strip()}\n```\n"


def _find(name: str) -> click.Command:
    found = group.get_command(click.Context(group), name)
    assert found is not None
    return found


def _command(path: str, command: click.Command) -> Iterator[str]:
    ctx = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(ctx)])
    yield f"\n## {path}\n\n```\n{usage}\n```\n"
    yield _prose(command.help or "")
    if isinstance(command, GroupedCommand) and command.unlisted:
        yield "\nThe options of a job are those of [submit](#clusterrun-submit)."
    yield "\n| option | meaning |\n|---|---|"
    for option in _options(command, ctx):
        yield f"| `{_cell(_spelling(option, ctx))}` | {_cell(_plain(option.help or ''))} |"
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from _command(f"{path} {name}", below)


def _options(command: click.Command, ctx: click.Context) -> Iterator[click.Option]:
    if isinstance(command, GroupedCommand):
        yield from command.listed_options(ctx)
    else:
        found = (each for each in command.get_params(ctx) if isinstance(each, click.Option))
        yield from (option for option in found if not option.hidden)


def _spelling(option: click.Option, ctx: click.Context) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    return names if option.is_flag or option.count else f"{names} {option.make_metavar(ctx)}"


def _prose(text: str) -> str:
    """Return a docstring as Markdown: what click keeps as it is becomes code."""
    parts = inspect.cleandoc(text).split("\n\n")
    kept = (f"```\n{p[2:].strip()}\n```" if p.startswith("\b") else p for p in parts)
    return "\n\n".join(part.replace("\f", "") for part in kept)


def _settings() -> Iterator[str]:
    yield f"{NOTICE}\n# Settings\n"
    yield "Each setting is a key of `clusterrun.yaml`, a field of `JobSpec` and an environment"
    yield "variable: `CLUSTERRUN_` and the key in capitals, with underscores for dots. On a command"
    yield "line, pass its option, or `--set KEY=VALUE`."
    yield "See [which source wins](../configuration.md).\n"
    for section in dict.fromkeys(field.group for field in FIELDS):
        yield f"\n## {section}\n\n| key | option | in Python | value | default | meaning |"
        yield "|---|---|---|---|---|---|"
        yield from (_setting(field) for field in FIELDS if field.group == section)


def _setting(field: Field) -> str:
    options = ", ".join(f"`{flag}`" for flag in field.flags)
    cells = (
        f"`{field.key}`",
        options,
        f"`{field.name}`",
        _value(field),
        _default(field),
        field.help,
    )
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _value(field: Field) -> str:
    if field.choices is not None:
        return ", ".join(f"`{choice.value}`" for choice in field.choices)
    return VALUES[field.kind]


def _default(field: Field) -> str:
    value = field.default
    if value is None or value == () or value == {}:
        return ""
    if isinstance(value, enum.Enum):
        return f"`{value.value}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _python() -> Iterator[str]:
    yield f"{NOTICE}\n# Python\n\n{(HERE / 'python.txt').read_text()}"
    yield "# Names\n\nNames not listed here may change without notice.\n\n## `import clusterrun`"
    for name in clusterrun.__all__:
        if not name.startswith("_"):
            yield from _object(name, getattr(clusterrun, name))
    yield "\n## `from clusterrun import runtime`\n"
    yield "The training script calls these functions. Outside a run, they do nothing."
    for name in runtime.__all__:
        yield from _object(f"runtime.{name}", getattr(runtime, name))
    yield "\n## `from clusterrun import hf`\n\nThese names are for Hugging Face's Trainer."
    source = (
        Path(clusterrun.__file__).with_name("hf.py").read_text()
    )  # not imported: it loads torch
    for node in ast.parse(source).body:
        public = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        if public:
            yield f"\n### `hf.{node.name}{_arguments(node)}`\n"
            yield _plain(ast.get_docstring(node) or "")


def schemas() -> dict[str, tuple[str, dict[str, list[str]]]]:
    """Return the command and the fields of each schema, those of its parts in their places."""
    data = _json_data()
    return {x["schema"]: (x["command"], _fields(x, data["parts"])) for x in data["schemas"]}


def _json_data() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((HERE / "json.yaml").read_text())
    return data


def _fields(schema: dict[str, Any], parts: dict[str, Any]) -> dict[str, list[str]]:
    found = {"schema": ["text", f"`{schema['schema']}`"]}
    used = {at: [n] if isinstance(n, str) else n for at, n in schema.get("parts", {}).items()}
    for name in used.pop("", []):
        found |= parts[name]
    for field, meaning in schema.get("fields", {}).items():
        found[field] = meaning
        for name in used.pop(field, []):
            found |= {f"{field}.{key}": value for key, value in parts[name].items()}
    for at, names in used.items():
        found |= {f"{at}.{key}": value for name in names for key, value in parts[name].items()}
    return found


def _json() -> Iterator[str]:
    data = _json_data()
    yield f"{NOTICE.replace('the code', 'json.yaml')}\n# JSON\n\n{data['intro']}"
    for schema, (command, fields) in schemas().items():
        yield f"## {schema}\n\n`{command}`\n\n| field | type | meaning |\n|---|---|---|"
        yield from (
            f"| `{name}` | {kind} | {_cell(text)} |" for name, (kind, text) in fields.items()
        )
        yield ""
    yield data["lines"].rstrip()


def _arguments(node: ast.ClassDef | ast.FunctionDef) -> str:
    called = next(each for each in ast.walk(node) if isinstance(each, ast.FunctionDef))
    arguments = ast.unparse(called.args).removeprefix("self, ")
    return f"({arguments})"


def _object(name: str, found: Any) -> Iterator[str]:
    yield f"\n### `{name}{_signature(found)}`\n\n{_plain(inspect.getdoc(found) or '')}"
    if not inspect.isclass(found):
        return
    for below, member in vars(found).items():
        if below.startswith("_") or not (callable(member) or isinstance(member, property)):
            continue
        target = member.fget if isinstance(member, property) else member
        doc = inspect.getdoc(target) or ""
        call = "" if isinstance(member, property) else _signature(target)
        yield f"\n`{_cell(f'.{below}{call}')}`: {_plain(doc.split(chr(10) + chr(10))[0])}"


def _signature(found: Any) -> str:
    if dataclasses.is_dataclass(found) or not callable(found):
        return ""
    try:
        text = str(inspect.signature(found))
    except ValueError:
        return ""
    return re.sub(r"<function .*? at 0x\w+>", "…", text).replace("'", "")


def _plain(text: str) -> str:
    return text.replace("<", "&lt;") if "`" not in text else text


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    causes = {GENERATED: generated()}
    man = HERE.parents[1] / "man"
    for place, written in ((HERE, pages()), (man, man_pages()), (CAUSES, causes)):
        for name, text in written.items():
            ((given or place) / name).write_text(text)
