"""A parsed training script: its calls, what decides whether they run, and its options."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

# What a script may import if the rest of the training is to be seen in it.
KNOWN: Final = {
    *("__future__", "abc", "argparse", "bisect", "collections", "contextlib", "copy", "csv"),
    *("dataclasses", "datetime", "enum", "functools", "gc", "glob", "gzip", "hashlib", "io"),
    *("itertools", "json", "logging", "math", "multiprocessing", "operator", "os", "pathlib"),
    *("pickle", "pprint", "random", "re", "shutil", "signal", "socket", "statistics", "string"),
    *("struct", "subprocess", "sys", "tempfile", "textwrap", "threading", "time", "traceback"),
    *("types", "typing", "typing_extensions", "urllib", "uuid", "warnings", "zipfile"),
    *("torch", "torchvision", "torchaudio", "numpy", "PIL", "tqdm", "pandas", "sklearn", "scipy"),
    *("matplotlib", "yaml", "datasets", "tokenizers", "einops", "rich", "psutil", "cv2", "wandb"),
    *("tensorboard", "tensorboardX", "evaluate", "safetensors", "tiktoken", "timm"),
}
# What trains, and calls nothing of the user's that the file does not show.
TRAINING: Final = (
    *("accelerate", "deepspeed", "lightning", "peft", "pytorch_lightning", "transformers", "trl"),
)
# Words of tests that do not choose ranks: how far the training is, and how good.
_OF_PROGRESS = (
    r"epochs?|steps?|iters?|iterations?|batch(?:es)?|every|freq(?:uency)?|interval|best|acc\w*|loss"
    r"|val|metric|score|prec\d*|total|max|min|last|completed|current|start|end|global|train|args?"
    r"|config|cfg|opts?|len|range|is|n|i|j|idx|it|self|save"
)
_HARMLESS_CONTEXTS = ("torch.no_grad", "torch.inference_mode", "torch.enable_grad", "open")
ENVIRON = "os.environ"
_JUMPS = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_BRANCHES = (
    *(ast.If, ast.IfExp, ast.While, ast.Try, ast.ExceptHandler, ast.BoolOp, ast.Match, ast.Lambda),
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Script:
    """A script's syntax tree. Raises SyntaxError, ValueError or RecursionError if it has none."""

    def __init__(self, source: bytes) -> None:
        self.tree = ast.parse(source)
        self.text = source.decode(errors="replace")
        self.lines = self.text.splitlines()
        self.parents: dict[ast.AST, ast.AST] = {}  # by child
        self._names: dict[str, str] = {}  # the full names of what is imported, by name
        self._calls: defaultdict[str, list[ast.Call]] = defaultdict(list)  # by called name
        self.nodes = tuple(ast.walk(self.tree))
        for node in self.nodes:
            self.parents.update((child, node) for child in ast.iter_child_nodes(node))
            self._names.update(_imported(node))
        for node in self.nodes:
            if isinstance(node, ast.Call):
                self._calls[self.name(node.func)].append(node)  # `name` needs all of `_names`

    @cached_property
    def packages(self) -> frozenset[str]:
        """The top-level packages that it imports; "." stands for its own directory."""
        found: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add("." if node.level else (node.module or "").partition(".")[0])
        return frozenset(found)

    def name(self, node: ast.AST) -> str:
        """Return the dotted name of an expression with imports resolved; "" if it has none.

        An attribute of anything but a name begins with a dot: `f().step` is ".step".
        """
        if isinstance(node, ast.Name):
            return self._names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.name(node.value)}.{node.attr}"
        return ""

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls of functions by dotted name; `.step` finds a method of any object."""
        for found, calls in self._calls.items():
            for name in names:
                if found == name or (name.startswith(".") and found.endswith(name)):
                    yield from calls
                    break

    def certain_calls(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls that the script makes in any case."""
        return (call for call in self.calls(*names) if not self.may_skip(call))

    def calls_on_all_ranks(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls that each rank makes if one does."""
        return (call for call in self.calls(*names) if not self.may_skip(call, some_ranks=True))

    def environ_assignments(self) -> Iterator[tuple[str, ast.expr, ast.AST]]:
        """Yield each unconditional assignment to `os.environ`: variable, value, statement.

        `setdefault` is left out: it keeps the variable of the launcher.
        """
        for node in (each for each in self.nodes if isinstance(each, ast.Assign)):
            for target in node.targets:
                if not isinstance(target, ast.Subscript) or self.name(target.value) != ENVIRON:
                    continue
                if not self.may_skip(node):
                    yield text_of(target.slice), node.value, node

    @cached_property
    def values(self) -> Mapping[str, list[ast.AST]]:
        """The nodes that give a name its value: of an argument, calls; of a function, its `def`."""
        found: defaultdict[str, list[ast.AST]] = defaultdict(list)
        for node in self.nodes:
            match node:
                case (
                    ast.Assign(targets=[target], value=value)
                    | ast.AnnAssign(target=target, value=ast.expr() as value)
                    | ast.NamedExpr(target=target, value=value)
                    | ast.AugAssign(target=target, value=value)
                    | ast.For(target=target, iter=value)
                    | ast.withitem(optional_vars=ast.expr() as target, context_expr=value)
                ):
                    pass  # each name in `target` gets all of `value`, even an index
                case ast.FunctionDef(name=name, args=target):
                    found[name].append(node)
                    # What callers pass: each argument gets all calls by that name, as one node.
                    value = ast.Tuple(elts=[*self.calls(name, f".{name}")])
                case _:
                    continue
            for each in ast.walk(target):  # names, attributes and arguments; all else under ""
                found[self.name(each) or getattr(each, "arg", "")].append(value)
        return found

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield the ancestors of a node, the innermost first, each with its child on the path."""
        while (parent := self.parents.get(node)) is not None:
            yield parent, node
            node = parent

    def branches(self, node: ast.AST) -> Iterator[tuple[ast.If, ast.AST]]:
        """Yield each `if` around a node in its function, as `ancestors` does."""
        for parent, child in self.ancestors(node):
            if isinstance(parent, Function):
                return
            if isinstance(parent, ast.If):
                yield parent, child

    def may_skip(
        self, node: ast.AST, *, some_ranks: bool = False, seen: set[ast.AST] | None = None
    ) -> bool:
        """Return whether a node may not run: due to a branch, an early exit, or who calls it.

        A function that this file does not call may not run. `some_ranks`: ask whether some ranks
        may skip the node while others run it. Decorators and contexts then count, too, but tests of
        the training's progress or quality don't. `seen`: the functions that were looked at before.
        """
        seen = set() if seen is None else seen
        for parent, child in self.ancestors(node):
            decides = self._may_choose_ranks if some_ranks else _is_conditional
            if decides(parent, child) or self._exits_before(parent, child, some_ranks=some_ranks):
                return True
            if isinstance(parent, Function):
                if parent in seen:  # it calls itself, or was already found to be skippable
                    return True
                seen.add(parent)
                called = self.parents[parent] if parent.name == "__init__" else parent
                name = getattr(called, "name", "?")  # of the function, or of the class
                calls = self.calls(name, f".{name}")
                return all(self.may_skip(x, some_ranks=some_ranks, seen=seen) for x in calls)
        return False

    def _may_choose_ranks(self, parent: ast.AST, child: ast.AST) -> bool:
        """Return whether what encloses a node may choose the ranks on which it runs."""
        match parent:
            case ast.If() | ast.IfExp() | ast.While():
                deciding = [parent.test] if _is_conditional(parent, child) else []
            case ast.BoolOp():
                deciding = [value for value in parent.values if value is not child]
            case ast.With() | ast.AsyncWith():
                deciding = [item.context_expr for item in parent.items]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                deciding = parent.decorator_list
            case ast.Match():
                deciding = [parent.subject]
            case _:
                return False
        return not all(self._cannot_choose_ranks(each) for each in deciding)

    def _cannot_choose_ranks(self, test: ast.expr) -> bool:
        """Return whether a test can't choose ranks: its words are about the training's progress."""
        if isinstance(test, ast.Call) and self.name(test.func) in _HARMLESS_CONTEXTS:
            return True
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
        words = [word for name in names for word in name.lower().split("_")]
        return all(re.fullmatch(_OF_PROGRESS, word) for word in words)

    def _exits_before(self, parent: ast.AST, child: ast.AST, *, some_ranks: bool) -> bool:
        """Return whether an `if` before `child` may leave its block.

        With `some_ranks`, only a test that may choose ranks counts.
        """
        for field in ("body", "orelse", "finalbody"):
            block = getattr(parent, field, None)
            if isinstance(block, list) and child in block:
                return any(
                    isinstance(each, ast.If)
                    and any(isinstance(jump, _JUMPS) for jump in each.body)
                    and not (some_ranks and self._cannot_choose_ranks(each.test))
                    for each in block[: block.index(child)]
                )
        return False

    def is_ignored(self, line: int, rule: str) -> bool:
        """Return whether the line's comment is `# clusterrun: ignore RULE`."""
        text = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        _, found, names = text.partition("clusterrun: ignore")
        return bool(found) and rule in re.split(r"[\s,]+", names)


def _is_conditional(parent: ast.AST, child: ast.AST) -> bool:
    """Return whether what is around a node decides if it runs; `if __name__ == ...` does not."""
    tests = ast.walk(parent.test) if isinstance(parent, ast.If) else ()
    if any(isinstance(node, ast.Name) and node.id == "__name__" for node in tests):
        return False
    return isinstance(parent, _BRANCHES) and child is not vars(parent).get("test")  # a test runs


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword argument."""
    return next((word.value for word in call.keywords if word.arg == name), None)


def has_unknown_arguments(call: ast.Call) -> bool:
    """Return whether a call unpacks arguments, so that some are not visible."""
    return any(word.arg is None for word in call.keywords) or any(
        isinstance(each, ast.Starred) for each in call.args
    )


def constant(node: ast.AST | None) -> object:
    """Return the value of a literal; None for anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def text_of(node: ast.AST | None) -> str:
    """Return a literal text; "" for anything else."""
    value = constant(node)
    return value if isinstance(value, str) else ""


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that an import binds, with what they stand for, if that is not the same."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname:
                yield alias.asname, alias.name
    elif isinstance(node, ast.ImportFrom) and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


# Which options it may have, from the sources of its project

_PARSERS: Final = ("absl", "argparse", "click", "docopt", "optparse", "typer")
_HARMLESS: Final = {*KNOWN, *TRAINING, *_PARSERS, "clusterrun", "huggingface_hub", "torchmetrics"}
# Parsers of other packages: they have none of our options, but the script may have any.
_FOREIGN_PARSERS: Final = {"draccus", "fire", "hydra", "jsonargparse", "simple_parsing", "tyro"}
_TAKES_ANY: Final = (
    r"parse_known_\w*args|REMAINDER|nargs *= *.\.\.\.|(?:ignore_unknown|allow_extra)_\w+"
    r"|return_remaining_\w+|\.from_cli\(|\bexec\(|\brunpy\b|import_module\([^)]*\)\.\w+\("
    r"|^import fire\b[\s\S]*\*\*\w"
)
_READS_WORDS: Final = r"(?<!len\(sys\.)\bargv\b(?!\[-?\d+\])"
# What a package that can't be read may parse arguments with, or have them from.
_RUNS_ANOTHER: Final = (
    r"(?i)\.(?:main|cli|app|run|launch)\b|\.\w*(?:arg|pars|option|flag|config|param)\w*\Z"
)
_JOINS_ANOTHER: Final = r"\bparents *=|\bsys\.path\b"
_OF_LIBRARY: Final = (
    r"HfArgumentParser|TrlParser|\b\w+CLI\b|add_config_arguments|add_argparse_args|parse_args_into"
)


class ScriptOptions:
    """A script's options, from the modules of its project; packages in `known` add no others."""

    def __init__(self, modules: Sequence[Script], known: Collection[str]) -> None:
        packages = {name for module in modules for name in module.packages}
        foreign = packages - {*_HARMLESS, *known, "."}  # which may have options of their own
        text = "\n".join(module.text for module in modules)
        has_known_parser = not packages.isdisjoint(_PARSERS)
        others_may_add = bool(foreign or re.search(_OF_LIBRARY, text))  # options of their own
        self.has_parser = has_known_parser or others_may_add  # it may parse its arguments
        self.takes_any = bool(  # any word may be an option
            not modules  # none could be read
            or re.search(_TAKES_ANY, text)  # such as parse_known_args()
            or _may_parse_elsewhere(modules, packages, foreign - _FOREIGN_PARSERS, text)
            or (not has_known_parser and re.search(_READS_WORDS, text))  # such as sys.argv
            or not all(map(_has_only_literal_options, modules))  # some are computed
        )
        self.are_visible = not (others_may_add or self.takes_any)  # the sources name all options
        has_bare_names = not packages.isdisjoint(("absl", "typer"))  # of options, without dashes
        with_names = not self.are_visible or has_bare_names
        words = (word for module in modules for word in _words(module, with_names=with_names))
        self._words = {word.replace("_", "-") for word in words}

    def may_have(self, option: str) -> bool:
        """Return whether the sources name an option, one that it shortens, or a field (`lr`)."""
        name = option.replace("_", "-")
        if not name.startswith("--"):
            return any(each.startswith(name) or each == name[1:] for each in self._words)
        return any(each.startswith((name, name[2:])) for each in self._words)


def _may_parse_elsewhere(
    modules: Sequence[Script], packages: Collection[str], unread: Collection[str], text: str
) -> bool:
    """Return whether one of the `unread` packages may add options to those of the modules."""
    # Fire makes options of any function; `parents=` adds those of another parser.
    if unread and ("fire" in packages or re.search(_JOINS_ANOTHER, text)):
        return True
    names = {module.name(node) for module in modules for node in module.nodes}  # such as `x.main`
    return any(n.partition(".")[0] in unread and re.search(_RUNS_ANOTHER, n) for n in names)


def _has_only_literal_options(script: Script) -> bool:
    """Return whether all options that a script adds to a parser are written out."""
    adders = (".add_argument", ".add_option", "click.option")
    calls = [*script.calls(*adders)]
    # More are named than called if one is passed on, or called by another name.
    named = sum(script.name(node).endswith(adders) for node in script.nodes)
    return named == len(calls) and all(text_of(name) for call in calls for name in call.args)


def _words(script: Script, *, with_names: bool) -> Iterator[str]:
    """Yield literal options and fields of classes; `with_names`, also parameters and all texts."""
    for node in script.nodes:
        text = text_of(node)
        if not re.search(r"\s", text) or "docopt" in script.packages:  # which reads its usage
            yield from re.findall(r"(?<![\w-])--?\w[\w-]*", text)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        if with_names:
            yield node.arg if isinstance(node, ast.arg) else text
