"""Regular expressions, written and made at random, with texts that they match."""

from __future__ import annotations

import random

WRITTEN: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z", ("2026-11-29T12:00:00Z",)),
    (r"[a-z0-9._-]{1,16}@[a-z0-9-]{1,16}\.(com|org|net)", ("a.b@c-d.org",)),
    (r"(?:\+\d{1,3} )?\(?\d{3}\)?[ -]\d{3}-\d{4}", ("+49 (555) 123-4567", "555-123-4567")),
    (r"#[0-9a-fA-F]{6}|#[0-9a-fA-F]{3}", ("#fff", "#00A1b2")),
    (r"(25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3}", ("10.0.0.1", "255.254.199.9")),
    (r"[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,4}", ("DE89 3704 0044", "GB82WEST12345698")),
    (r"v?\d+\.\d+\.\d+(-[0-9A-Za-z.-]{1,9})?", ("1.2.3", "v10.0.1-rc.1")),
    (r"(yes|no|maybe)( (yes|no|maybe)){0,3}", ("yes", "no maybe yes")),
    (r"[01]+b?", ("0", "0110b")),
    (r"(ab|a)(bc|c)?", ("ab", "abc", "abbc", "ac")),
    (r"(a|ab)(c|bcd)(d?)", ("acd", "abcd", "abbcd", "ac")),
    (r"x*y+z?", ("y", "xxyyz")),
    (r"[^\s]{1,5}", ("abc", "é漢")),
    (r".{0,6}", ("", "a\tb", "漢字")),
    (r"\w{1,4}\s\w{1,4}", ("ab cd", "é_ 9")),
    (r"(\(\d\))+|\[\d\]", ("(1)(2)", "[3]")),
    (r"\$\d{1,3}(,\d{3})*\.\d{2}", ("$1,234.50", "$7.00")),
    (r"[\u4e00-\u9fa5]{2,4}", ("漢字",)),
    (r"[😀-😂]{1,2}!", ("😀!",)),
    (r"\"[^\"\\]{0,8}\"", ('"a b"', '""')),
    (r"SELECT [a-z]{1,8} FROM [a-z]{1,8}( WHERE [a-z]{1,5} = \d{1,4})?", ("SELECT a FROM b WHERE c = 12",)),
    (r"(0|-?[1-9]\d{0,5})(\.\d{1,3})?", ("0", "-12.5", "0.125")),
    (r"a{2}b{0}c{1,}", ("aac", "aaccc")),
    (r"(?i:ok|fine)", ("OK", "fInE")),
    (r"[+\-*/^.]{1,3}", ("+-*", "^")),
    (r"\x41\t\n?", ("A\t", "A\t\n")),
    (r"(|a)b", ("b", "ab")),
    (r"((a|b){2}c){1,2}", ("abc", "bbcaac")),
    (r"^start.*end$", ("start end", "startend")),
    (r"no newline[^\n]{0,3}", ("no newline", "no newlineabc")),
)


def random_pattern(source: random.Random, depth: int = 3) -> tuple[str, str]:
    """A pattern and one text that it matches."""
    kind = source.randrange(6 if depth else 2)
    if kind == 0:
        text = source.choice(["foo", "ab", "x y", "1.5", "é", "<t>", "漢", "{", "a+b"])
        return "".join(c if c.isalnum() or c in " <>" else "\\" + c for c in text), text
    if kind == 1:
        pattern, members = source.choice([("[a-f0-9]", "af0"), (r"\d", "019"), ("[^x-z]", "aé"), ("[A-C_]", "AB_")])
        return pattern, source.choice(members)
    if kind == 2:
        parts = [random_pattern(source, depth - 1) for _ in range(source.randint(2, 3))]
        return "".join(p for p, _ in parts), "".join(t for _, t in parts)
    if kind == 3:
        parts = [random_pattern(source, depth - 1) for _ in range(source.randint(2, 3))]
        return "(" + "|".join(p for p, _ in parts) + ")", source.choice(parts)[1]
    part, text = random_pattern(source, depth - 1)
    low = source.randrange(3)
    high = low + source.randrange(3) or 1
    times = source.randint(low, high)
    return f"(?:{part}){{{low},{high}}}", text * times


def patterns(count: int, seed: int = 0) -> list[tuple[str, tuple[str, ...]]]:
    """Different patterns with matching texts: the written ones, then random ones."""
    source = random.Random(seed)
    made = dict(WRITTEN)
    while len(made) < count:
        pattern, text = random_pattern(source)
        if len(pattern) < 120 and len(text) < 60:
            made.setdefault(pattern, (text,))
    return list(made.items())[:count]
