"""Texts that a user may type, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

NASTY = [
    *("", " ", "-n", "a b", "it's", 'dq"x', "back\\slash", "\\", "ends\\\\", "$(touch canary)"),
    *("`touch canary`", "; touch canary", "&& touch canary", "$HOME ${PATH} $1 !! *", "a#b #c"),
    *("#SBATCH --wrap=x", "%j %x %%", "~/x", "{a,b}", "a=b", "\u00fcn\u00ef \U0001f600"),
]
LINES = [
    *("two\nlines", "\n#SBATCH --job-name=evil\n#PBS -N evil\n", "dos\r\nline", "tab\there"),
    *("\x1b[31mred\x7f", "END_OF_FILE\nEND_OF_FILE_\n"),
]
BYTES = [b"\xff\xfe".decode(errors="surrogateescape"), "a\udc80b'"]
TEXT = st.one_of(
    st.sampled_from(NASTY + LINES + BYTES),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    st.binary().map(lambda data: data.replace(b"\0", b"").decode(errors="surrogateescape")),
)
LINE = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.characters(exclude_characters="\x7f", exclude_categories=["Cs", "Cc"])),
    st.text("\\'\"# $`!%a=", max_size=12),
)
