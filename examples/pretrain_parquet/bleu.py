"""Corpus BLEU-4 with one reference for each text.

Papineni, Roukos, Ward and Zhu, "BLEU: a Method for Automatic Evaluation of Machine Translation",
ACL 2002, sections 2.1 to 2.3. Each rank counts its texts; the sums of all ranks give the score of
the whole corpus.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

LONGEST = 4
TOKEN = re.compile(r"\w+|[^\w\s]")  # words, and single punctuation marks
Sums = list[int]  # matches of 1- to 4-grams, their number in the texts, lengths of both sides


def tokens(text: str) -> list[str]:
    """Split a text into words and punctuation marks.

    >>> tokens("It's 3 o'clock.")
    ['It', "'", 's', '3', 'o', "'", 'clock', '.']
    """
    return TOKEN.findall(text)


def count(candidate: Sequence[str], reference: Sequence[str]) -> Sums:
    """Return the counts of one text for BLEU.

    An n-gram matches at most as often as it occurs in the reference ("modified precision").
    """
    matches, totals = [], []
    for n in range(1, LONGEST + 1):
        ours, theirs = _ngrams(candidate, n), _ngrams(reference, n)
        matches.append((ours & theirs).total())
        totals.append(ours.total())
    return [*matches, *totals, len(candidate), len(reference)]


def score(sums: Sequence[int]) -> float:
    """Return BLEU-4 (0 to 100) of summed counts, without smoothing: 0 if no 4-gram matches."""
    matches, totals = sums[:LONGEST], sums[LONGEST : 2 * LONGEST]
    length, reference_length = sums[2 * LONGEST :]
    if not all(matches):
        return 0.0
    precision = sum(math.log(m / t) for m, t in zip(matches, totals, strict=True)) / LONGEST
    brevity = min(0.0, 1 - reference_length / length)  # log of the brevity penalty
    return 100 * math.exp(brevity + precision)


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
