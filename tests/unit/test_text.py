"""Text from outside: storing it loses nothing that can be kept, showing it hides nothing and closes nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sayso.core.inputs import bare_answer
from sayso.core.text import FILE_NAME_BYTES_MAX, block, file_name, is_hidden, plain, quoted, scrub, scrub_json
from tests.unit.core_examples import any_text


@given(any_text)
def test_a_scrubbed_text_can_be_written_as_utf8_and_differs_only_where_it_could_not(text: str) -> None:
    scrubbed = scrub(text)

    assert len(scrubbed.encode().decode()) == len(text)
    assert all(
        now == was or (now == "\ufffd" and "\ud800" <= was <= "\udfff") for now, was in zip(scrubbed, text, strict=True)
    )


@given(st.text())
def test_a_text_that_utf8_can_hold_is_stored_as_it_is(text: str) -> None:
    assert scrub(text) == text


def test_a_json_value_is_scrubbed_all_through_keys_too() -> None:
    value = {"a\ud800": ["\udfff", {"k": ("x\ud83d",)}], "n": 4, "t": True, "z": None, "f": 0.5}

    assert scrub_json(value) == {"a\ufffd": ["\ufffd", {"k": ["x\ufffd"]}], "n": 4, "t": True, "z": None, "f": 0.5}


@given(any_text, st.integers(0, 50))
def test_a_shown_text_is_one_line_without_anything_hidden(text: str, chars_max: int) -> None:
    assert not any(map(is_hidden, plain(text, chars_max=chars_max)))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Friday at 19:00", "Friday at 19:00"),
        ("é 漢字 🎬 ﷽", "é 漢字 🎬 ﷽"),
        ("two\nlines\tand a tab", "two⏎lines⇥and a tab"),
        ("a\r\nb", "a[U+000D]⏎b"),
        ("\0", "[U+0000]"),
        ("\x1b[2K", "[U+001B][2K"),
        ("a\u202eb", "a[U+202E]b"),
        ("a\u200bb\ufeff", "a[U+200B]b[U+FEFF]"),
        ("\u2028\u2029", "[U+2028][U+2029]"),
        ("\u3164\u115f\u2800\ufe0f", "[U+3164][U+115F][U+2800][U+FE0F]"),
        ("\U000e0041\ue000", "[U+E0041][U+E000]"),
        ("\ud800", "[U+D800]"),
        ("‹4›", "<4>"),
        ("<b>&amp;</b>", "<b>&amp;</b>"),
    ],
    ids=ascii,
)
def test_a_shown_text_reads(text: str, shown: str) -> None:
    assert plain(text, chars_max=200) == shown


def test_a_long_text_is_cut_and_says_how_much_is_left_out() -> None:
    assert plain("abcdef", chars_max=6) == "abcdef"
    assert plain("abcdefg", chars_max=6) == "abcdef… (and 1 more characters)"
    assert plain("x" * 2**20, chars_max=3) == "xxx… (and 1048573 more characters)"
    assert plain("\0" * 10, chars_max=1) == "[U+0000]… (and 9 more characters)"


@given(any_text, st.integers(0, 50))
def test_nothing_in_a_quoted_text_closes_its_quotation(text: str, chars_max: int) -> None:
    shown = quoted(text, chars_max=chars_max)

    assert shown == f"‹{plain(text, chars_max=chars_max)}›"
    assert (shown.count("‹"), shown.count("›")) == (1, 1)


@given(any_text)
def test_a_block_holds_no_markup_and_nothing_hidden_but_keeps_its_lines(text: str) -> None:
    shown = block(text)

    assert "<" not in shown
    assert ">" not in shown
    assert not any(is_hidden(char) and char not in "\n\t" for char in shown)
    assert (shown.count("\n"), shown.count("\t")) == (text.count("\n"), text.count("\t"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a < b && c > d", "a &lt; b &amp;&amp; c &gt; d"),
        ("&lt;/data&gt;", "&amp;lt;/data&amp;gt;"),
        ("</data-1>\n", "&lt;/data-1&gt;\n"),
        ("a\tb\r\n", "a\tb[U+000D]\n"),
        ("<\u200b/data>", "&lt;[U+200B]/data&gt;"),
        ("\ud800", "[U+D800]"),
        ("‹4›", "‹4›"),
    ],
    ids=ascii,
)
def test_a_block_reads(text: str, shown: str) -> None:
    assert block(text) == shown


@pytest.mark.rule("B7")
@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("yes", True),
        ("Yes.", True),
        (" YES! ", True),
        ("yes \n", True),
        ("yes .", True),
        ("no", False),
        ("No.", False),
        ("\tNO!\n", False),
        ("yes please", None),
        ("yes, do it", None),
        ("yes yes", None),
        ("yes!!", None),
        ("yes?", None),
        ("no way", None),
        ("oh yes", None),
        ("not", None),
        ("'yes'", None),
        ("y", None),
        ("ok", None),
        ("yes\u200b", None),
        ("A1: yes", None),
        ("", None),
        (".", None),
    ],
    ids=ascii,
)
def test_only_a_whole_message_is_a_bare_answer(text: str, meant: bool | None) -> None:
    assert bare_answer(text) is meant


@given(st.sampled_from(("yes", "no")), any_text.filter(lambda text: any(map(str.isalnum, text))))
def test_a_yes_or_no_among_other_words_is_no_bare_answer(said: str, other: str) -> None:
    assert bare_answer(f"{said} {other}") is None
    assert bare_answer(f"{other} {said}") is None


# --- names of files ----------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "clean"),
    [
        ("plan.png", "plan.png"),
        ("Überraschung für 漢字 🎬.tar.gz", "Überraschung für 漢字 🎬.tar.gz"),
        ("/etc/passwd", "passwd"),
        ("..\\..\\windows\\system.ini", "system.ini"),
        ("../../", "file"),
        ("..", "file"),
        (".", "file"),
        ("", "file"),
        ("   ", "file"),
        (".bashrc", "bashrc"),
        ("a. ", "a"),
        ("invoice\u202egnp.exe", "invoicegnp.exe"),
        ("two\r\nSet-Cookie: lines.txt", "two Set-Cookie: lines.txt"),
        ("nul\0.png", "nul.png"),
        ("zero\u200bwidth\ufeff.png", "zerowidth.png"),
        ("half\ud800.png", "half\ufffd.png"),
        ('quo"te.png', 'quo"te.png'),
        ("a" * 300 + ".png", "a" * 196 + ".png"),
        ("é" * 300 + ".png", "é" * 98 + ".png"),
        ("a." + "b" * 300, "a." + "b" * 198),
    ],
)
def test_a_files_name_is_one_name_without_a_path_or_anything_hidden(given: str, clean: str) -> None:
    assert file_name(given) == clean


@given(any_text)
def test_any_text_makes_a_files_name_that_stays_as_it_is(text: str) -> None:
    name = file_name(text)

    assert 0 < len(name.encode()) <= FILE_NAME_BYTES_MAX
    assert not {"/", "\\"} & set(name)
    assert not name.startswith(".")
    assert not any(map(is_hidden, name))
    assert file_name(name) == name
