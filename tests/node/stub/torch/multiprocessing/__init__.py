from .spawn import spawn  # noqa: F401 - as torch does
