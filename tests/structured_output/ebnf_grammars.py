"""Grammars in EBNF, the same in Lark's notation for an independent parser, and sentences."""

from __future__ import annotations

import attrs


@attrs.frozen
class Language:
    ebnf: str
    lark: str
    good: tuple[str, ...]
    bad: tuple[str, ...]


LANGUAGES = (
    Language(
        'root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" root ")"',
        'start: term (("+"|"-") term)*\nterm: /[0-9]/+ | "(" start ")"',
        ("1", "(12+3)-(4-(5))"),
        ("", "1+", "(1"),
    ),
    Language('root ::= "a" root "b" | "ab"', 'start: "a" start "b" | "ab"', ("ab", "aaabbb"), ("aab", "ba", "")),
    Language('root ::= "(" root ")" root | ""', 'start: "(" start ")" start |', ("", "()", "(())()"), ("(", ")(")),
    Language("root ::= [a-c]{2,4}", "start: /[a-c]/~2..4", ("ab", "cccc"), ("a", "abcab", "ad")),
    Language('root ::= ("x" | "y")+ "z"?', 'start: ("x"|"y")+ "z"?', ("x", "xyyz"), ("z", "xzz")),
    Language(
        'root ::= pair (", " pair)*\npair ::= key ": " value\nkey ::= [a-z]+\nvalue ::= [0-9]+ | key',
        'start: pair (", " pair)*\npair: key ": " value\nkey: /[a-z]/+\nvalue: /[0-9]/+ | key',
        ("a: 1", "ab: cd, e: 12"),
        ("a:1", "a: 1,"),
    ),
    Language(
        'root ::= "[" (item ("," item)*)? "]"\nitem ::= root | [0-9]',
        'start: "[" (item ("," item)*)? "]"\nitem: start | /[0-9]/',
        ("[]", "[1,[2,[]]]"),
        ("[1", "[1,]"),
    ),
    Language(
        'root ::= "<" name ">" body "</" name ">"\nname ::= "a" | "b"\nbody ::= root | [0-9]*',
        'start: "<" name ">" body "</" name ">"\nname: "a" | "b"\nbody: start | /[0-9]/*',
        ("<a>12</a>", "<a><b></b></b>"),
        ("<a>", "<c></c>"),
    ),
    Language(
        'root ::= "select " col ("," col)*\ncol ::= [a-z]+',
        'start: "select " col ("," col)*\ncol: /[a-z]/+',
        ("select a,bc",),
        ("select ", "select a,"),
    ),
    Language(
        'root ::= or\nor ::= and (" or " and)*\nand ::= not (" and " not)*\nnot ::= "not " not | [p-s] | "(" or ")"',
        'start: or\nor: and (" or " and)*\nand: not (" and " not)*\nnot: "not " not | /[p-s]/ | "(" or ")"',
        ("p", "not p and (q or r)"),
        ("p and", "not"),
    ),
    Language('root ::= "é" | "漢" "字"?', 'start: "é" | "漢" "字"?', ("é", "漢", "漢字"), ("字", "é漢")),
    Language("root ::= [^a-z\\n]+", "start: /[^a-z\\n]/+", ("AB1", "é漢 😀"), ("a", "A\n", "")),
    Language(
        'root ::= "\\"" ([^"\\\\] | "\\\\" ["\\\\])* "\\""',
        'start: "\\"" (/[^"\\\\]/ | /\\\\["\\\\]/)* "\\""',
        ('""', '"a\\"b"'),
        ('"', '"\\"'),
    ),
    Language(
        'root ::= "0" | "-"? [1-9] [0-9]*', 'start: "0" | "-"? /[1-9]/ /[0-9]/*', ("0", "-12", "907"), ("-0", "01")
    ),
    Language(
        'root ::= line+\nline ::= "- " [a-z ]+ "\\n"',
        'start: line+\nline: "- " /[a-z ]/+ "\\n"',
        ("- a b\n- c\n",),
        ("- a", "a\n"),
    ),
    Language(
        'root ::= ("a" "b"? | "b" "a"?){3}', 'start: ("a" "b"? | "b" "a"?)~3', ("aaa", "abba", "bab"), ("a", "aaaaaaa")
    ),
    Language(
        'root ::= s\ns ::= "if " c " then " s | "if " c " then " s " else " s | "x=" [0-9]\nc ::= [a-c]',
        'start: s\ns: "if " c " then " s | "if " c " then " s " else " s | "x=" /[0-9]/\nc: /[a-c]/',
        ("x=1", "if a then if b then x=1 else x=2"),
        ("if a then", "if d then x=1"),
    ),
    Language(
        'root ::= move (" " move)*\nmove ::= [KQRBN]? [a-h] [1-8] | "O-O" "-O"?',
        'start: move (" " move)*\nmove: /[KQRBN]/? /[a-h]/ /[1-8]/ | "O-O" "-O"?',
        ("e4 Nf6 O-O-O",),
        ("e9", "O-"),
    ),
    Language(
        'root ::= a | b\na ::= "1" b | "1"\nb ::= "2" a | "2"',
        'start: a | b\na: "1" b | "1"\nb: "2" a | "2"',
        ("1", "1212", "212"),
        ("11", ""),
    ),
    Language(
        'root ::= hex (":" hex){5}\nhex ::= [0-9a-f]{2}',
        'start: hex (":" hex)~5\nhex: /[0-9a-f]/~2',
        ("00:1a:2b:3c:4d:5e",),
        ("00:1a", "00:1a:2b:3c:4d:5"),
    ),
)
