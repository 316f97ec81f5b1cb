"""Text from outside, made safe to store and safe to show. Nothing here changes what a text says.

`scrub` is for storing: every string that enters a row can be written as UTF-8 and read back; `storable` is for
a column of its own.
`plain` is for showing: nothing invisible stays invisible, nothing can leave its quotation.
"""

from __future__ import annotations

import re
import unicodedata

#: the two characters that open and close a value in a question; escaped inside a value
OPEN, CLOSE = "\u2039", "\u203a"

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
#: what Unicode says to ignore in display (Default_Ignorable_Code_Point of its 15.0 data), though it calls
#: some of it letters or marks; a known way to hide words. And the blank braille cell, which is no blank.
_IGNORABLE = (
    (0x00AD, 0x00AD),
    (0x034F, 0x034F),
    (0x061C, 0x061C),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x200B, 0x200F),
    (0x202A, 0x202E),
    (0x2060, 0x206F),
    (0x2800, 0x2800),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFF8),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE0FFF),
)
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def scrub(text: str) -> str:
    """Return `text` with each lone surrogate, which no UTF-8 can hold, as U+FFFD."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def storable(text: str) -> str:
    """Return `text` as a column of any store can hold it: scrubbed, and each NUL as U+FFFD too, since PostgreSQL's
    texts have none. JSON in a column needs only `scrub`: it writes a NUL as an escape."""
    return scrub(text).replace("\0", "\ufffd")


def scrub_json(value: object) -> object:
    """Return a JSON value with every string in it scrubbed, keys too."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {scrub(str(key)): scrub_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub_json(item) for item in value]
    return value


def is_hidden(char: str) -> bool:
    """Return whether a reader could not see `char`, or it would reorder what she sees."""
    if char.isascii():
        return not char.isprintable()
    return unicodedata.category(char) in _UNSEEN or any(first <= ord(char) <= last for first, last in _IGNORABLE)


class _Shown(dict[int, str]):
    """What each character becomes where hidden ones are shown, for `str.translate`; filled as characters are met."""

    def __missing__(self, point: int) -> str:
        char = chr(point)
        shown = f"[U+{point:04X}]" if is_hidden(char) else char
        if point <= _KEPT_MAX:
            self[point] = shown
        return shown


#: the last code point whose replacement is kept once it is known, so that nobody can fill the memory
_KEPT_MAX = 0xFFFF
_ON_ONE_LINE = _Shown({ord("\n"): "⏎", ord("\t"): "⇥", ord(OPEN): "<", ord(CLOSE): ">"})
_IN_A_BLOCK = _Shown({ord("\n"): "\n", ord("\t"): "\t", ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"})


#: bytes of a file's name, its ending included; what file systems take, and more than anybody reads
FILE_NAME_BYTES_MAX = 200
_ENDING_CHARS_MAX = 16


def file_name(text: str) -> str:
    """Return `text` as the name of a file: on one line, nothing hidden, no path, no dot in front, cut with its ending
    kept. `file` if nothing is left."""
    last = re.split(r"[/\\]", scrub(text))[-1]
    seen = " ".join("".join(" " if c.isspace() else "" if is_hidden(c) else c for c in last).split())
    name = seen.strip(". ") or "file"
    if len(name.encode()) <= FILE_NAME_BYTES_MAX:
        return name
    stem, dot, ending = name.rpartition(".")
    tail = f".{ending}" if dot and len(ending) <= _ENDING_CHARS_MAX else ""
    left = FILE_NAME_BYTES_MAX - len(tail.encode())
    return (stem if tail else name).encode()[:left].decode("utf-8", "ignore").rstrip(". ") + tail


def plain(text: str, *, chars_max: int) -> str:
    """Return `text` on one line with hidden characters shown, cut with a count of what is left out.

    A hidden character becomes its code point in brackets, so that neither an invisible word
    nor a right-to-left override can make a question read as another one (B6).
    """
    shown = text[:chars_max]
    if not (shown.isascii() and shown.isprintable()):
        shown = shown.translate(_ON_ONE_LINE)
    left = len(text) - chars_max
    return f"{shown}… (and {left} more characters)" if left > 0 else shown


def quoted(text: str, *, chars_max: int) -> str:
    """Return `text` between the marks of a value; nothing in it can close them (B6)."""
    return f"{OPEN}{plain(text, chars_max=chars_max)}{CLOSE}"


def block(text: str) -> str:
    """Return `text` for a labelled part that the model reads: no markup, nothing invisible (B4).

    Line breaks and tabs stay, since they carry meaning; `<` and `&` are escaped, so that
    nothing inside can look like the tag that ends the part.
    """
    return text.translate(_IN_A_BLOCK)


def attribute(text: str) -> str:
    """Return `text` for the header of a labelled part: as `block`, on one line, and it can't end its quotes."""
    return block(plain(text, chars_max=200)).replace('"', "&quot;")
