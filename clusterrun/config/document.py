"""A configuration file's text as settings; YAML's own guesses about types are not asked for.

A scalar is taken as the text that stands in the file, so `mixed_precision: no` is "no" and
`time: 1:30:00` is not the number 5400.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from clusterrun.config.fields import Field, Kind
from clusterrun.config.keys import BY_KEY, SECTIONS, hint_for_key
from clusterrun.config.settings import Anchor, Origin, Setting, settings_of
from clusterrun.config.values import Raw, unexpanded_variable
from clusterrun.errors import ConfigError, UsageError

_NULL: Final = "tag:yaml.org,2002:null"
_MERGE: Final = "tag:yaml.org,2002:merge"
_TEXT_TAGS: Final = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "timestamp", "value")
)


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A file that was found; `shown` is how messages name it, `strict` refuses unknown keys."""

    shown: str
    text: str
    anchor: Anchor
    strict: bool

    @property
    def origin_name(self) -> str:
        """Name it in origins: a leading `./` tells a file from a word."""
        plain = not self.shown.startswith(("/", "~", "."))
        return f"./{self.shown}" if plain else self.shown


@dataclass(kw_only=True)
class Document:
    """What a file says: settings, those of each profile, and the profile it asks for."""

    file: ConfigFile
    settings: list[Setting] = field(default_factory=list)
    profiles: dict[str, list[Setting]] = field(default_factory=dict)
    profile: tuple[str, Origin] | None = None
    errors: list[UsageError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def parse_document(file: ConfigFile) -> Document:
    """Read the text of a file; its mistakes are collected in `errors`, in the file's order."""
    document = Document(file=file)
    reader = _Reader(document)
    try:
        root = reader.compose()
        if root is not None and not _says_nothing(root):
            reader.read_root(root)
    except ConfigError as error:
        document.errors.append(error)
    return document


def parse_flow(text: str, *, label: str) -> Raw:
    """Read `[a, b]` or `{NAME: value}`, the form of lists and mappings in one variable.

    Raises UsageError when the text is not YAML.
    """
    file = ConfigFile(shown=label, text=text, anchor=Anchor(), strict=True)
    reader = _Reader(Document(file=file))
    try:
        node = reader.compose()
        if isinstance(node, SequenceNode):
            return reader.texts(node)
        return reader.texts_by_name(node) if isinstance(node, MappingNode) else text
    except ConfigError as error:
        hint = "write [first, second] or {NAME: value}, as in YAML"
        raise UsageError(f"{label}: {error.message}", hint=hint, cause=error.cause) from error


class _Reader:
    """Walks the nodes of one file."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.file = document.file
        self.profile = ""
        self.known_pairs: dict[int, list[tuple[str, Node, Node]]] = {}

    def compose(self) -> Node | None:
        """Parse the text into nodes; None for an empty file."""
        try:
            self.loader = yaml.SafeLoader(self.file.text)
            return self.loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            raise self._marked(error) from error
        except yaml.reader.ReaderError as error:
            line = self.file.text.count("\n", 0, error.position) + 1
            raise self._broken(error.reason, f"{self.file.shown}:{line}") from error
        except RecursionError as error:
            raise self._broken("nested too deeply", self.file.shown) from error

    def _marked(self, error: yaml.MarkedYAMLError) -> ConfigError:
        mark = error.problem_mark or error.context_mark
        where = f"{self.file.shown}:{mark.line + 1}:{mark.column + 1}" if mark else None
        cause = " ".join(filter(None, (error.context, error.problem)))
        return self._broken(cause, where or self.file.shown)

    def _broken(self, cause: str, where: str) -> ConfigError:
        hint = "indent with spaces" if "'\\t'" in cause else ()
        return ConfigError("this is not valid YAML", cause=cause, hint=hint, where=where)

    def read_root(self, root: Node) -> None:
        """Read the top level: plain keys, sections, profiles."""
        if not isinstance(root, MappingNode):
            raise self.wrong(root, "the file must hold 'key: value' lines")
        for name, key, value in self.pairs(root):
            if name == "profiles":
                self.read_profiles(value)
            elif name == "profile":
                self.read_profile_choice(value)
            else:
                self.read_key(name, key, value)

    def read_profile_choice(self, value: Node) -> None:
        """Take the name of the profile that this file asks for."""
        if not isinstance(value, ScalarNode):
            self.document.errors.append(self.wrong(value, "profile must be a single name"))
        elif value.tag != _NULL:
            self.document.profile = (value.value, self.origin(value))

    def read_profiles(self, node: Node) -> None:
        """Read each profile as if it were a file of its own."""
        if _says_nothing(node):
            return
        if not isinstance(node, MappingNode):
            hint = "write profiles: {a100: {slurm: {partition: gpu}}}"
            self.document.errors.append(self.wrong(node, "profiles must be a mapping", hint))
            return
        for name, _key, value in self.pairs(node):
            self.profile = name
            self.document.profiles.setdefault(name, [])
            if isinstance(value, MappingNode):
                for inner, key, child in self.pairs(value):
                    self.read_key(inner, key, child)
            elif not _says_nothing(value):
                self.document.errors.append(
                    self.wrong(value, f"profile '{name}' must be a mapping")
                )
        self.profile = ""

    def read_key(self, name: str, key: Node, value: Node, section: str = "") -> None:
        """Read one key of the top level, of a profile or of a section."""
        full = f"{section}.{name}" if section else name
        if not section and name in SECTIONS:
            self.read_section(name, value)
        elif full in BY_KEY and (section or "." not in name):
            self.read_value(BY_KEY[full], key, value)
        else:
            self.unknown(name, section, key)

    def read_section(self, section: str, node: Node) -> None:
        """Read the keys of `slurm:`, `launch:` or `network:`."""
        if _says_nothing(node):
            return
        if not isinstance(node, MappingNode):
            self.document.errors.append(
                self.wrong(node, f"[{section}] must hold 'key: value' lines")
            )
            return
        for name, key, value in self.pairs(node):
            self.read_key(name, key, value, section)

    def read_value(self, field: Field, key: Node, node: Node) -> None:
        """Read a value; an empty one says nothing."""
        if _says_nothing(node):
            return
        try:
            if field.kind is Kind.MAPPING:
                for setting in self.named_settings(field, node):
                    self.keep(setting)
                return
            origin = self.origin(key, at=node)
            for setting in settings_of(
                field, self.raw(node), origin, self.file.anchor, label=field.key
            ):
                self.keep(setting)
        except UsageError as error:
            self.document.errors.append(error)

    def named_settings(self, field: Field, node: Node) -> Iterator[Setting]:
        """Read a mapping name by name, so that each has its own line."""
        if not isinstance(node, MappingNode):
            raise self.wrong(node, f"{field.key} must be a mapping", f"write {field.key}: {{A: 1}}")
        for name, key, value in self.pairs(node):
            raw = {name: self.text(value, name)}
            yield from settings_of(field, raw, self.origin(key), self.file.anchor, label=field.key)

    def keep(self, setting: Setting) -> None:
        """Add a setting to the file's own or to the profile's that is being read."""
        variable = unexpanded_variable(setting.field, setting.value)
        if variable is not None:
            self.document.warnings.append(
                f"{setting.origin.where}: {setting.key} holds '{variable}', which is not expanded "
                f"in files; export {setting.field.env} in your shell's profile instead"
            )
        into = self.document.profiles[self.profile] if self.profile else self.document.settings
        into.append(setting)

    def unknown(self, name: str, section: str, key: Node) -> None:
        """Refuse a key that nobody declared, or pass over it in a file of another version."""
        inside = f" in section [{section}]" if section else ""
        inside += f" of profile '{self.profile}'" if self.profile else ""
        message = f"unknown key '{name}'{inside}"
        hint = hint_for_key(name, section)
        if self.file.strict:
            self.document.errors.append(self.wrong(key, message, hint))
        else:
            self.document.warnings.append(f"{self.at(key)}: {message} is ignored; {hint}")

    def pairs(self, node: MappingNode) -> list[tuple[str, Node, Node]]:
        """List the keys of a mapping with their nodes; `<<` is YAML's merge.

        Raises ConfigError for a key that is given twice or is no text.
        """
        if id(node) not in self.known_pairs:  # an alias leads to the same node again
            self._refuse_duplicates(node)
            try:
                self.loader.flatten_mapping(node)
            except yaml.MarkedYAMLError as error:
                raise self._marked(error) from error
            found = {self._name(key): (key, value) for key, value in node.value}
            self.known_pairs[id(node)] = [(name, *nodes) for name, nodes in found.items()]
        return self.known_pairs[id(node)]

    def _refuse_duplicates(self, node: MappingNode) -> None:
        seen: dict[str, Node] = {}
        for key, _value in node.value:
            if key.tag == _MERGE:
                continue
            name = self._name(key)
            if name in seen:
                line = seen[name].start_mark.line + 1
                raise self.wrong(key, f"key '{name}' is given twice", f"first given in line {line}")
            seen[name] = key

    def _name(self, key: Node) -> str:
        if isinstance(key, ScalarNode):
            return str(key.value)
        raise self.wrong(key, "a key must be a word")

    def raw(self, node: Node) -> Raw:
        """Take the texts out of a node."""
        if isinstance(node, SequenceNode):
            return self.texts(node)
        return self.texts_by_name(node) if isinstance(node, MappingNode) else self.text(node, "")

    def texts(self, node: SequenceNode) -> tuple[str, ...]:
        """Take the items of a list of scalars."""
        return tuple(self.text(item, "an item") for item in node.value)

    def texts_by_name(self, node: MappingNode) -> Mapping[str, str]:
        """Take the values of a mapping of scalars."""
        return {name: self.text(value, name) for name, _key, value in self.pairs(node)}

    def text(self, node: Node, what: str) -> str:
        """Take the text of a scalar as it stands in the file."""
        if not isinstance(node, ScalarNode):
            raise self.wrong(node, f"{what or 'this'} must be a single value")
        if node.tag not in _TEXT_TAGS:
            raise self.wrong(node, f"a value of type {node.tag} cannot be used")
        if node.tag == _NULL and not node.value:
            raise self.wrong(node, f"{what} has no value", "write '' for an empty text")
        return str(node.value)

    def wrong(self, node: Node, message: str, hint: str | tuple[str, ...] = ()) -> ConfigError:
        """Make the error that points at a node."""
        return ConfigError(message, hint=hint, where=self.at(node))

    def at(self, node: Node) -> str:
        """Name the place of a node: file:line:column, counted from 1."""
        mark = node.start_mark
        return f"{self.file.shown}:{mark.line + 1}:{mark.column + 1}"

    def origin(self, key: Node, at: Node | None = None) -> Origin:
        """Name the line that says a value."""
        text = f"{self.file.origin_name}:{key.start_mark.line + 1}"
        if self.profile:
            text += f" (profile {self.profile})"
        return Origin(text=text, where=self.at(at or key))


def _says_nothing(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.tag == _NULL
