"""Read the settings of a configuration file, without YAML's guesses about types.

A scalar is read as its text in the file: `mixed_precision: no` is "no", and `time: 1:30:00` is not
the number 5400.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from clusterrun.config.environments import setup_line
from clusterrun.config.fields import Field, Kind, Raw
from clusterrun.config.settings import Anchor, ConfigFile, Origin, Setting, settings_of
from clusterrun.config.spec import BY_KEY, SECTIONS, hint_for_key
from clusterrun.errors import ConfigError, UsageError

MOST_VALUES: Final = 100_000  # those that a merge repeats included
_DEEPEST: Final = 50
MERGE: Final = "tag:yaml.org,2002:merge"
_BROKEN: Final = "this is not valid YAML"
MOST_HINTS: Final = 100  # most mistakes that get a hint: each takes a search
_VARIABLE: Final = r"\$(?:[A-Za-z_]\w*|\{\w+\})"
_NULL: Final = "tag:yaml.org,2002:null"
_TEXT_TAGS: Final = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "timestamp", "value")
)


def parse_document(file: ConfigFile, *, only: str = "") -> Document:
    """Read the text of a file; collect its mistakes in `errors`, in the order of the file.

    `only` names a key without a section: all others are skipped, and so are their mistakes.
    """
    document = Document(file, only)
    try:
        root = document.compose()
        if root is not None:
            document.read_root(root)
    except ConfigError as error:
        document.errors.append(error)
    return document


def parse_flow(field: Field, text: str, *, label: str) -> Raw:
    """Read a text that begins with [ or {; messages name it `label`. Raises UsageError."""
    file = ConfigFile(shown=label, text=text, anchor=Anchor(), strict=True)
    reader = Document(file)
    try:
        node = reader.compose()
        return reader.raw(field, node) if isinstance(node, SequenceNode | MappingNode) else text
    except ConfigError as error:
        hint = "write [first, second] or {NAME: value}, as in YAML"
        raise UsageError(f"{label}: {error.message}", hint=hint, cause=error.cause) from error


class Document:
    """The settings of a file, those of each profile, and the profile that it selects."""

    def __init__(self, file: ConfigFile, only: str = "") -> None:
        self.file, self.only = file, only  # `only`, if not "", is the one key that is read
        self.settings: list[Setting] = []
        self.profiles: dict[str, list[Setting]] = {}
        self.profile: tuple[str, Origin] | None = None
        self.errors: list[UsageError] = []
        self.warnings: list[str] = []
        self.values = 0  # the number of those that were read so far
        self.in_profile = ""  # the profile that is being read

    def compose(self) -> Node | None:
        """Parse the text into nodes; None for an empty file."""
        try:
            self.loader = BoundedLoader(self.file.text)
            return self.loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            raise self._broken(error) from error
        except yaml.reader.ReaderError as error:
            line = self.file.text.count("\n", 0, error.position) + 1
            where = f"{self.file.shown}:{line}"
            raise ConfigError(_BROKEN, cause=error.reason, where=where) from error

    def _broken(self, error: yaml.MarkedYAMLError) -> ConfigError:
        mark = error.problem_mark or error.context_mark
        where = f"{self.file.shown}:{mark.line + 1}:{mark.column + 1}" if mark else None
        cause = " ".join(filter(None, (error.context, error.problem)))
        return ConfigError(_BROKEN, cause=cause, where=where or self.file.shown)

    def read_root(self, root: Node) -> None:
        """Read the top level: plain keys, sections, profiles."""
        message = "the file must contain 'key: value' lines"
        for name, key, value in self.entries(root, message, "write key: value"):
            if name == "profiles":
                self.read_profiles(value)
            elif name == "profile":
                if not _is_empty(value):
                    self.profile = (self.text(value, name), self.origin(value))
            else:
                self.read_key(name, key, value)

    def read_profiles(self, node: Node) -> None:
        """Read each profile like a separate file."""
        hint = "write profiles: {a100: {slurm: {partition: gpu}}}"
        for name, _key, value in self.entries(node, "profiles must be a mapping", hint):
            self.in_profile = name
            self.profiles.setdefault(name, [])
            for inner, key, child in self.entries(value, f"profile '{name}' must be a mapping"):
                self.read_key(inner, key, child)
        self.in_profile = ""

    def read_key(self, name: str, key: Node, value: Node, section: str = "") -> None:
        """Read one key of the top level, of a profile or of a section."""
        full = f"{section}.{name}" if section else name
        if self.only not in ("", full):
            return
        if not section and name in SECTIONS:
            message = f"section [{name}] must contain 'key: value' lines"
            for inner, inner_key, child in self.entries(value, message, "write KEY: value"):
                self.read_key(inner, inner_key, child, name)
        elif full in BY_KEY and (section or "." not in name):  # `slurm.nodes: 2` is unknown
            self.read_value(BY_KEY[full], key, value)
        else:
            self.refuse_unknown(name, section, key)

    def entries(
        self, node: Node, message: str, hint: str | tuple[str, ...] = ()
    ) -> list[tuple[str, Node, Node]]:
        """List (name, key, value) of a mapping; any other node is a mistake, unless it is empty."""
        if isinstance(node, MappingNode):
            return self.pairs(node)
        if not _is_empty(node):
            self.errors.append(self.wrong(node, message, hint))
        return []

    def read_value(self, field: Field, key: Node, node: Node) -> None:
        """Read a value, unless it is empty."""
        if _is_empty(node):
            return
        into = self.profiles[self.in_profile] if self.in_profile else self.settings
        try:
            for setting in self.settings_in(field, key, node):
                found = re.search(_VARIABLE, setting.value) if field.kind is Kind.PATH else None
                if found:
                    self.warnings.append(
                        f"{setting.origin.where}: {field.key} has '{found[0]}', which is not "
                        f"expanded in files; export {field.env} in your shell's profile instead"
                    )
                into.append(setting)
        except UsageError as error:
            self.errors.append(error)

    def settings_in(self, field: Field, key: Node, node: Node) -> Iterator[Setting]:
        """Read a value. The names of a mapping are separate settings, each with its line."""
        anchor, label = self.file.anchor, field.key
        if field.kind is not Kind.MAPPING:
            raw, origin = self.raw(field, node), self.origin(key, at=node)
            yield from settings_of(field, raw, origin, anchor, label=label)
        elif not isinstance(node, MappingNode):
            raise self.wrong(node, f"{label} must be a mapping", f"write {label}: {{A: 1}}")
        else:
            for name, item, value in self.pairs(node):
                pair = {name: self.text(value, name)}
                yield from settings_of(field, pair, self.origin(item), anchor, label=label)

    def refuse_unknown(self, name: str, section: str, key: Node) -> None:
        """Refuse an unknown key, or warn of it in a file that other versions may also read."""
        inside = f" in section [{section}]" if section else ""
        inside += f" of profile '{self.in_profile}'" if self.in_profile else ""
        message = f"unknown key '{name}'{inside}"
        mistakes = len(self.errors) + len(self.warnings)
        hint = hint_for_key(name, section) if mistakes < MOST_HINTS else "use a known key"
        if self.file.strict:
            self.errors.append(self.wrong(key, message, hint))
        else:
            self.warnings.append(f"{self.at(key)}: {message} is ignored; {hint}")

    def pairs(self, node: MappingNode) -> list[tuple[str, Node, Node]]:
        """List the keys of a mapping with their nodes; `<<` is YAML's merge.

        Raises ConfigError for a key that is given twice or is not a text.
        """
        first: dict[str, Node] = {}
        for key, _value in node.value:
            if key.tag == MERGE:
                continue
            name = self._name(key)
            earlier = first.setdefault(name, key)
            if earlier is not key:
                hint = f"keep one; the first is on line {earlier.start_mark.line + 1}"
                raise self.wrong(key, f"key '{name}' is given twice", hint)
        try:
            self.loader.flatten_mapping(node)
        except yaml.MarkedYAMLError as error:
            raise self._broken(error) from error
        self.count(len(node.value), node)
        return [(self._name(key), key, value) for key, value in node.value]

    def count(self, number: int, node: Node) -> None:
        """Count values that are read, repetitions by aliases included. Raises ConfigError."""
        self.values += number
        if self.values > MOST_VALUES:
            hint = "use fewer aliases (*) and merges (<<)"
            raise self.wrong(node, f"the file has more than {MOST_VALUES:,} values", hint)

    def _name(self, key: Node) -> str:
        if isinstance(key, ScalarNode):
            return str(key.value)
        raise self.wrong(key, "a key must be a word", "write key: value")

    def raw(self, field: Field, node: Node) -> Raw:
        """Return the text of a scalar, the texts of a list, or those of a mapping by name."""
        if field.name == "setup" and not isinstance(node, ScalarNode):
            return tuple(self.setup_lines(node))
        if isinstance(node, SequenceNode):
            return tuple(self.text(item, "an item") for item in node.value)
        if isinstance(node, MappingNode):
            return {name: self.text(value, name) for name, _key, value in self.pairs(node)}
        return self.text(node, "")

    def setup_lines(self, node: Node) -> Iterator[str]:
        """Yield the lines of a list; a mapping, in or instead of a list, names environments."""
        for item in node.value if isinstance(node, SequenceNode) else [node]:
            if not isinstance(item, MappingNode):
                yield self.text(item, "an item")
                continue
            for kind, key, value in self.pairs(item):
                one_or_more = value.value if isinstance(value, SequenceNode) else [value]
                names = [self.text(each, kind) for each in one_or_more]
                try:
                    yield setup_line(kind, names)
                except UsageError as error:
                    raise self.wrong(key, error.message, error.hints) from error

    def text(self, node: Node, what: str) -> str:
        """Return the text of a scalar as written in the file; messages name it by `what`."""
        self.count(1, node)
        if not isinstance(node, ScalarNode):
            raise self.wrong(node, f"{what or 'this'} must be a single value", "write one value")
        if node.tag not in _TEXT_TAGS:
            raise self.wrong(node, f"the tag {node.tag} is not supported", "remove the tag")
        if node.tag == _NULL and not node.value:
            raise self.wrong(node, f"{what} has no value", "write '' for an empty string")
        return str(node.value)

    def wrong(self, node: Node, message: str, hint: str | tuple[str, ...] = ()) -> ConfigError:
        """Return the error that points at a node."""
        return ConfigError(message, hint=hint, where=self.at(node))

    def at(self, node: Node) -> str:
        """Return the position of a node: file:line:column, counted from 1."""
        mark = node.start_mark
        return f"{self.file.shown}:{mark.line + 1}:{mark.column + 1}"

    def origin(self, key: Node, at: Node | None = None) -> Origin:
        """Return a value's origin: its line and profile; errors point at `at`, else at `key`."""
        shown = self.file.shown
        if not shown.startswith(("/", "~", ".")):
            shown = f"./{shown}"  # so that it reads as a file, not as a word
        text = f"{shown}:{key.start_mark.line + 1}"
        if self.in_profile:
            text += f" (profile {self.in_profile})"
        return Origin(text=text, where=self.at(at or key), is_of_user=self.file.is_of_user)


def _is_empty(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.tag == _NULL


class BoundedLoader(yaml.SafeLoader):
    """Raises MarkedYAMLError for too many values, and for values that are nested too deeply.

    Its time and memory are bounded, whatever the aliases in a file repeat.
    """

    values = depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Read a value and the values in it."""
        self.depth += 1
        self._count(1, self.peek_event())  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def flatten_mapping(self, node: MappingNode) -> None:
        """Merge what `<<` names, as YAML does; keep each key once."""
        written = node.value
        merges = [value for key, value in written if key.tag == MERGE]
        if not merges:
            return
        # Hide its merges until they are flattened: a mapping that merges itself has no end.
        node.value = [(key, value) for key, value in written if key.tag != MERGE]
        for merge in merges:
            for merged in merge.value if isinstance(merge, SequenceNode) else [merge]:
                if isinstance(merged, MappingNode):
                    self.flatten_mapping(merged)
                    self._count(len(merged.value), node)  # before super() copies them
        node.value = written
        super().flatten_mapping(node)
        # The mapping's own pairs come last, and win.
        by_key = {k.value if isinstance(k, ScalarNode) else id(k): (k, v) for k, v in node.value}
        node.value = list(by_key.values())

    def _count(self, number: int, at: Any) -> None:
        self.values += number
        problem = "nested too deeply" if self.depth > _DEEPEST else ""
        if problem or self.values > MOST_VALUES:
            problem = problem or f"more than {MOST_VALUES:,} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)
