"""Read YAML of others: a file takes time and memory by its length, whatever it repeats."""

from __future__ import annotations

from typing import Any, Final

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MOST_VALUES: Final = 100_000  # those that a merge repeats included
_DEEPEST: Final = 50
MERGE: Final = "tag:yaml.org,2002:merge"


class BoundedLoader(yaml.SafeLoader):
    """Raises MarkedYAMLError for too many values, and for values that are nested too deeply."""

    values = depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Read a value and what is in it."""
        self.depth += 1
        self._count(1, self.peek_event())  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def flatten_mapping(self, node: MappingNode) -> None:
        """Merge what `<<` names, as YAML does; keep each key once."""
        own, merges = node.value, [value for key, value in node.value if key.tag == MERGE]
        node.value = [(key, value) for key, value in own if key.tag != MERGE]  # it may name itself
        for each in merges:
            for merged in each.value if isinstance(each, SequenceNode) else [each]:
                if isinstance(merged, MappingNode):
                    self.flatten_mapping(merged)
                    self._count(len(merged.value), node)
        node.value = own
        if merges:
            super().flatten_mapping(node)
            pairs = ((k.value if isinstance(k, ScalarNode) else id(k), k, v) for k, v in node.value)
            node.value = list({name: (key, value) for name, key, value in pairs}.values())

    def _count(self, number: int, at: Any) -> None:
        self.values += number
        problem = "nested too deeply" if self.depth > _DEEPEST else ""
        if problem or self.values > MOST_VALUES:
            problem = problem or f"more than {MOST_VALUES:,} values"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)
