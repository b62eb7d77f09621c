"""Find the lines of a log that report an error, and classify them."""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import lru_cache

TRACEBACK, EXCEPTION, SEVERE, ERROR = "traceback", "exception", "severe", "error"

_NO_NUMBER = rb"(?!\s*[-+]?(?:\d+\.|\.\d|\d+(?:e[-+]?\d+)?\s*(?:$|,)|nan\b|inf\b))"
_NO_METRIC = rb"(?!\s*[-+]?(?:\d*\.\d|nan\b|inf\b))"
_LEVEL = rb"(?:ERROR|CRITICAL|FATAL)"

# What a line that may report an error contains; letters only, in upper or lower case. A pattern
# decides, compiled at its first use: most agents need none. None may backtrack without bounds: the
# agent reads everything that a rank writes.
_WORDS = (
    *("of memory", "kill", "bad_alloc", "allocate memory", "error", "NCCL WARN", "aborted"),
    *("watchdog", "Timeout at", "assertion", "Xid (PCI", "segmentation fault", "exception"),
    *("terminate called", "received by PID", "critical", "fatal"),
)
# Why a run dies: memory, NCCL, the GPU, a signal. What it was is for `diagnosis/causes` to say.
_SEVERE = (
    # memory
    rb"CUDA out of memory|OutOfMemory|CUDA error: out of memory|\b[Oo]ut [Oo]f [Mm]emory\b"
    rb"|\boom[-_]kill|std::bad_alloc|[Cc]an(?:no|')t allocate memory"
    rb"|(?:^|signal: |task [\d,\-]+: |\d )Killed(?:$|[.\s(])|\bMemoryError\b"
    # NCCL
    rb"|\bNCCL WARN\b|NCCL error|\bnccl[A-Z]\w*Error\b|\bDistBackendError\b"
    rb"|NCCL communicator was aborted|[Ww]atchdog (?:caught|thread|got stuck)"
    rb"|Timeout at (?:NCCL|collective)"
    # CUDA and its driver
    rb"|CUDA(?: driver| runtime)? error\b|\bcudaError(?!_)[A-Z]\w*|device-side assert"
    rb"|\bXid \(PCI|\bcuDNN error|\bCUDNN_STATUS_(?!SUCCESS)"
    rb"|\bCUBLAS_STATUS_(?!SUCCESS)|block: \[.{0,99}Assertion|uncorrectable ECC error"
    # signals
    rb"|\bSegmentation fault|\b[Bb]us error\b|(?:^|task [\d,\-]+: |\d )Aborted\b"
    rb"|Fatal Python error|terminate called|\bSignal \d+ \(SIG\w+\) received by PID"
)
_ERROR = b"|".join(
    (
        # the level of a log line
        rb"^(?:wandb: )?" + _LEVEL + rb"(?:[:\]|]| (?![a-z]*=))" + _NO_NUMBER,
        rb"\[" + _LEVEL + rb"\s*\]",
        rb"[-|:]\s*" + _LEVEL + rb"\s*[-|:]\s" + _NO_NUMBER,
        rb"^\W?\d[\d\-/:.,TZ ]{6,30}\]?\s+(?:\[?[\w.]+\]?:?\s+)?" + _LEVEL + rb"\b",
        rb"\blevel=(?:error|critical|fatal)\b",
        rb"\"level(?:name)?\": ?\"(?i:error|critical|fatal)\"",
        rb"^E\d{4} \d\d:\d\d:\d\d|\[E(?:\d{3,4} \d\d:| \w+\.cpp:)",
        # a program's own message
        rb"(?:^|^[\w./+\-]+: |[:)\d]: )(?:fatal )?[Ee]rror:\s" + _NO_NUMBER,
        rb"^(?:fatal|panic|FATAL): |\*\*\* [^*]*\bError \d+$",
        rb"(?:^|[\]:>|)] ?)(?:[A-Za-z_]\w*\.)*[A-Z_]\w*(?:Error|Exception)(?:$|: )" + _NO_METRIC,
        rb"^(?:Exception (?:raised|in|ignored)|Unhandled exception|Caught \w+Error in)",
        rb"\bAssertion [`'\"(].{0,400}failed",
    )
)
_PYTHON_WARNING = rb"\b[A-Z]\w*Warning: "
_WARNING = rb"\bWARN(?:ING)?\b|^W\d{4} |\blevel=warn"
_COLOUR = rb"\x1b\[[0-9;]*m"
_PREFIX = (
    rb"(?:\[(?:rank|default|Rank |node)?\d+\]:? ?|\d{1,7}: ?"
    rb"|\(\w[^()=]* pid=\d+(?:[^()\d][^()]*)?\) ?|PID \d+: ?)+"
)
_TRACEBACK_START = b"Traceback (most recent call last):"
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")

_LOOKED_AT = 4096  # bytes of a line that are searched
_ZEROES = bytes.maketrans(b"123456789", b"000000000")
_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NOT_KEPT = bytes(set(range(256)) - set(_LETTERS + b"\n"))


def _letters(text: bytes) -> bytes:
    return text.translate(None, _NOT_KEPT).lower()


_LITERALS = (*(_letters(text.encode()) for text in _WORDS), _letters(_TRACEBACK_START))


def may_hold_errors(block: bytes) -> bool:
    """Return whether these lines, with or without stamps, may include one that reports an error.

    Without digits and bars most lines of a training are equal. Searching only distinct ones is
    three times as fast. `E0801 …` (glog) has no letters to search for.
    """
    forms = b"\n".join(set(block.translate(None, _NOT_KEPT).split(b"\n")))
    if b"E" in forms and (b"E0" in block or b"E1" in block):  # a month follows: 01 to 12
        return True
    return any(map(forms.lower().__contains__, _LITERALS))


class Classifier:
    """Classifies lines of many sources that arrive interleaved."""

    def __init__(self) -> None:
        self._in_traceback: set[Hashable] = set()

    def is_in_traceback(self, source: Hashable) -> bool:
        """Return whether the next line of a source continues a traceback."""
        return source in self._in_traceback

    def classify(self, source: Hashable, text: bytes) -> str:
        """Return the id of a line's kind; "" for a line that reports no error.

        A traceback ends with its first line without indentation, which names the exception.

        >>> classifier = Classifier()
        >>> lines = [b"Traceback (most recent call last):", b'  File "a.py"', b"KeyError: 3", b"x"]
        >>> [classifier.classify(0, line) for line in lines]
        ['traceback', 'traceback', 'exception', '']
        """
        is_inside = source in self._in_traceback
        if not is_inside and not may_hold_errors(text):
            return ""
        shown = _shown(text)
        if shown.endswith(_TRACEBACK_START):
            self._in_traceback.add(source)
            return TRACEBACK
        if shown.startswith(_CHAINED):
            return TRACEBACK
        if not is_inside:
            return _kind(shown)
        if shown[:1] in (b" ", b"\t"):
            return TRACEBACK
        if not shown:
            return ""
        self._in_traceback.discard(source)
        kind = _kind(shown)
        return EXCEPTION if kind in ("", ERROR) else kind


def _shown(text: bytes) -> bytes:
    """Return a line without colours, launchers' prefixes and overwritten bars."""
    if b"\x1b" in text:
        text = re.sub(_COLOUR, b"", text)
    text = text.rstrip()
    text = text[text.rfind(b"\r") + 1 :]
    prefix = re.match(_PREFIX, text[:_LOOKED_AT])
    return text[prefix.end() :] if prefix else text


def _kind(shown: bytes) -> str:
    return _kind_of_form(shown[:_LOOKED_AT].translate(_ZEROES))


@lru_cache(maxsize=512)
def _kind_of_form(form: bytes) -> str:
    """Return the kind of all lines that differ only in digits; cached, since errors repeat."""
    if re.search(_PYTHON_WARNING, form):
        return ""
    if re.search(_SEVERE, form):
        return SEVERE
    return ERROR if re.search(_ERROR, form) and not re.search(_WARNING, form) else ""
