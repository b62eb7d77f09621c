"""The template engine: every value passes through a quoting filter."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterrun.errors import ConfigError
from clusterrun.rendering.quoting import (
    Quoted,
    comment_text,
    directive_line,
    sbatch_word,
    sh_word,
    yaml_scalar,
)
from clusterrun.shared.assets import template_directories

if TYPE_CHECKING:
    from jinja2 import BytecodeCache, Environment
    from jinja2.bccache import Bucket

_FILTERS = {
    "sh": sh_word,
    "directive": directive_line,
    "sbatch": sbatch_word,
    "yaml": yaml_scalar,
    "comment": comment_text,
}


class Renderer:
    """Templates by name, those of a site or a project before ours."""

    def __init__(self, template_dirs: Sequence[Path] = (), compiled: Path | None = None) -> None:
        self._environment = _environment((*template_dirs, *template_directories()), compiled)

    def render(self, name: str, values: Mapping[str, Any]) -> str:
        """Render one template.

        Raises ConfigError with its name if it is missing, broken, or prints a value that
        passed through no quoting filter.
        """
        import jinja2

        try:
            return self._environment.get_template(name).render(values)
        except jinja2.TemplateSyntaxError as error:
            where = f"{error.filename or name}:{error.lineno}"
            raise ConfigError(
                f"template {name} cannot be parsed", where=where, cause=str(error)
            ) from error
        except jinja2.TemplateNotFound as error:
            raise ConfigError(
                f"template {name} needs {error.name}, which does not exist",
                hint="check template_dirs",
            ) from error
        except (jinja2.TemplateRuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"template {name} cannot be rendered", cause=str(error)) from error


@lru_cache(maxsize=8)  # with what it has compiled; a file that changed is read anew
def _environment(directories: tuple[Path, ...], compiled: Path | None) -> Environment:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # A project's templates are not trusted: they must not reach Python objects.
    environment = ImmutableSandboxedEnvironment(
        loader=jinja2.FileSystemLoader([str(directory) for directory in directories]),
        undefined=jinja2.StrictUndefined,
        finalize=_only_quoted,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        bytecode_cache=_kept_in(compiled) if compiled else None,
    )
    environment.filters |= {name: partial(_filtered, quote) for name, quote in _FILTERS.items()}
    return environment


def _kept_in(directory: Path) -> BytecodeCache:
    """Return a cache of compiled templates; trouble with its files is ignored."""
    import jinja2

    class Kept(jinja2.FileSystemBytecodeCache):
        def load_bytecode(self, bucket: Bucket) -> None:
            with contextlib.suppress(Exception):  # a damaged file; the template is compiled anew
                super().load_bytecode(bucket)

        def dump_bytecode(self, bucket: Bucket) -> None:
            with contextlib.suppress(OSError):
                super().dump_bytecode(bucket)

    return Kept(str(directory))


def _filtered(quote: Any, value: Any) -> Quoted:
    return Quoted(quote(_defined(value)))


def _only_quoted(value: Any) -> Any:
    if not isinstance(_defined(value), Quoted):
        raise TypeError(f"{value!r} passed through none of the filters {', '.join(_FILTERS)}")
    return value


def _defined(value: Any) -> Any:
    import jinja2

    if isinstance(value, jinja2.Undefined):
        str(value)  # raises UndefinedError with its own message
    return value
