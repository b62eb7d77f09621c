from .optimizer import Optimizer  # noqa: F401 - as torch does
