"""Ids of jobs: a text of another party becomes an id only here, before it names a file."""

from __future__ import annotations

import re

_FORM = r"[LH]?[0-9]{1,15}|[0-9]{1,15}[_+][0-9]{1,9}|"


class JobId(str):
    """4711, 4711_3 (task of an array), 4711+1 (component), L3 (this machine), H4 (on hosts).

    "" is no job. Any other text raises ValueError.
    """

    __slots__ = ()

    def __new__(cls, text: object = "") -> JobId:
        """Check the text."""
        if not isinstance(text, str):
            raise ValueError(f"a job id is a text, not of type {type(text).__name__}")
        if re.fullmatch(_FORM, text) is None:
            raise ValueError(f"{text[:40]!r} is not a job id")
        return super().__new__(cls, text)

    @classmethod
    def read(cls, text: object) -> JobId:
        """Return the id; "" if the text is none."""
        try:
            return cls(text)
        except ValueError:
            return cls()

    @property
    def is_own(self) -> bool:
        """Return whether clusterrun gave the id, and no scheduler."""
        return self.startswith(("L", "H"))

    @property
    def number(self) -> int:
        """The number that orders ids; 0 for none."""
        return int(re.split("[_+]", self.lstrip("LH"))[0] or 0)
