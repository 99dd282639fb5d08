"""Relations are the pairs that their definitions say; parses and sub-words are read as they are written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.errors import DTypeError, ShapeError
from clearhead.heads import Pairs, Parse, Tokens, aligned

IDS = [5, 7, 5, 5, 9, 7]
TEXT = Tokens(IDS, texts=["mat", " cat", " mat", "mat", " .", " cat"], words=[0, 1, 2, 2, 3, None])


def listed(pairs: Pairs) -> list[tuple[int, int]]:
    _, t, s = pairs.tokens()
    return sorted(zip(t.tolist(), s.tolist(), strict=True))


def where(holds: object, n: int = 6) -> list[tuple[int, int]]:
    return [(t, s) for t in range(n) for s in range(n) if holds(t, s)]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("pairs", "holds"),
    [
        (TEXT.previous(), lambda t, s: s == t - 1),
        (TEXT.next(), lambda t, s: s == t + 1),
        (TEXT.itself(), lambda t, s: s == t),
        (TEXT.first(), lambda t, s: s == 0 < t),
        (TEXT.offset(-3), lambda t, s: s == t - 3),
        (TEXT.offset(9), lambda t, s: False),
        (TEXT.window(3), lambda t, s: 0 <= t - s < 3),
        (TEXT.same_token(), lambda t, s: s < t and IDS[s] == IDS[t]),
        (TEXT.induction(), lambda t, s: 0 < s < t and IDS[s - 1] == IDS[t]),
        (TEXT.punctuation(), lambda t, s: s == 4 != t),
        (TEXT.special(), lambda t, s: s == 5 != t),
        (TEXT.special([7]), lambda t, s: s in (1, 5) and s != t),
        (TEXT.same_word(), lambda t, s: {t, s} == {2, 3}),
        (TEXT.pairs([(4, 1), (0, 5)]), lambda t, s: (t, s) in ((4, 1), (0, 5))),
        (TEXT.spans([[(0, 1), (2, 4)], [(1, 2)]]), lambda t, s: (t in (2, 3) and s == 0) or (t == 0 and s in (2, 3))),
        (TEXT.of_words([(2, 0), (1, 2)]), lambda t, s: (t in (2, 3) and s == 0) or (t == 1 and s in (2, 3))),
    ],
    ids=lambda value: value.name if isinstance(value, Pairs) else "",
)
def test_a_relation_is_its_definition(pairs: Pairs, holds: object) -> None:
    assert listed(pairs) == where(holds)


@given(st.lists(st.integers(0, 3), max_size=12))
def test_copies_and_induction_are_found_whatever_repeats(ids: list[int]) -> None:
    text, n = Tokens(torch.tensor(ids, dtype=torch.long)), len(ids)
    copies = where(lambda t, s: s < t and ids[s] == ids[t], n)
    assert listed(text.same_token()) == copies
    assert listed(text.same_token(nearest=True)) == sorted(dict(copies).items())  # the last of each query
    assert listed(text.induction()) == where(lambda t, s: 0 < s < t and ids[s - 1] == ids[t], n)


CONLLU = """# text = I don't
1\tI\tI\tPRON\t_\t_\t3\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\t_\t_\t3\taux\t_\t_
3\tnot\tnot\tPART\t_\t_\t0\troot\t_\t_
3.1\tgo\tgo\tVERB\t_\t_\t_\t_\t_\t_

1\tStop\tstop\tVERB\t_\t_\t0\troot\t_\t_
"""


def test_parses_come_from_conllu_and_from_spacy() -> None:
    one, two = Parse.read(CONLLU)
    assert one == Parse(("I", "do", "not"), (2, 2, None), ("nsubj", "aux", "root"))
    assert two.heads == (None,)
    words = [SimpleNamespace(i=i, text=one.words[i], dep_=one.labels[i]) for i in range(3)]
    for word, head in zip(words, one.heads, strict=True):
        word.head = word if head is None else words[head]
    assert Parse.of(words) == one
    with pytest.raises(ShapeError, match=r"expected ten columns with tabs between them.*got '1 I'"):
        Parse.read("1 I")


def test_an_arc_is_between_all_tokens_of_its_words() -> None:
    parse, tokens = Parse.read(CONLLU)[0], Tokens([1, 2, 3, 4, 5, 6], words=[None, 0, 1, 2, 2, None])
    assert listed(parse.pairs(tokens)) == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert listed(parse.pairs(tokens, "aux")) == [(2, 3), (2, 4)]
    assert listed(parse.pairs(tokens, "aux", to_dependents=True)) == [(3, 2), (4, 2)]
    with pytest.raises(ShapeError, match=r"the parse has 3 words, the tokens 6. Tokenize the words of the parse"):
        parse.pairs(Tokens([1, 2, 3, 4, 5, 6]))


def test_spans_that_overlap_expect_each_other_and_no_token_itself() -> None:
    assert listed(Tokens([1, 2, 3]).spans([[(0, 2), (1, 3)]])) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]


def test_no_tokens_are_a_sequence() -> None:
    assert listed(Tokens([]).induction()) == listed(Tokens([]).previous()) == []


@pytest.mark.parametrize(
    ("ids", "heads", "message"),
    [
        ("1 2", "3 0", "the head of word 1, 'w', is '3'; expected another word of the 2"),
        ("1 2", "_ 0", "the head of word 1, 'w', is '_'"),
        ("1 2", "-1 0", "the head of word 1, 'w', is '-1'"),
        ("1 2", "2 2", "the head of word 2, 'w', is '2'"),
        ("1 3", "0 1", "'w' is numbered 3, and is word 2 of its sentence"),
        ("1 1", "0 1", "'w' is numbered 1, and is word 2 of its sentence"),
        ("1 x", "0 1", "the first the number of a word, got 'x\\\\tw"),
        ("1 ²", "0 1", "the first the number of a word"),
    ],
)
def test_errors_in_conllu_are_said(ids: str, heads: str, message: str) -> None:
    rows = (f"{n}\tw\t_\t_\t_\t_\t{head}\tdep" for n, head in zip(ids.split(), heads.split(), strict=True))
    with pytest.raises(ShapeError, match=message):
        Parse.read("\n".join(rows))


def test_conllu_may_come_from_windows_and_hold_any_letter() -> None:
    (parse,) = Parse.read("\ufeff# text\r\n1\ta\u2028\x0bb\t_\t_\t_\t_\t0\troot\r\n\r\n")
    assert parse == Parse(("a\u2028\x0bb",), (None,), ("root",))
    with pytest.raises(DTypeError, match="a str, got bytes"):
        Parse.read(b"1")  # type: ignore[arg-type]


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ShapeError, match=r"Tokens\(words\): expected one a token, 2, got 3"):
        Tokens([1, 2], words=[0, 1, 2])
    with pytest.raises(ShapeError, match="the pieces of text are not known"):
        Tokens([1, 2]).punctuation()
    with pytest.raises(ShapeError, match=r"a key in \[7, 7\]; there are 0 to 1"):
        Tokens([1, 2]).pairs([(0, 7)])
    for wrong in ([(0.5, 1)], [(0, 1, 0)], [3], "ab"):
        with pytest.raises(DTypeError, match=r"pairs 'pairs': expected \(query, key\) pairs of whole numbers"):
            Tokens([1, 2]).pairs(wrong)  # type: ignore[arg-type]
    for span in ((2, 0), (0, 3), (-1, 1), (1, 1), 1):
        with pytest.raises(ShapeError, match=r"is no span; expected \(start, stop\), 0 <= start < stop <= 2"):
            Tokens([1, 2]).spans([[(0, 1), span]])  # type: ignore[list-item]
    for call, message in (
        (lambda: Tokens([1, 2]).window(0), r"window\(w=0\): expected an integer >= 1"),
        (lambda: Tokens([1, 2]).near(-1), r"near\(most=-1\): expected an integer >= 0"),
        (lambda: Tokens([1, 2]).near(2, least=3), r"near\(most=2\): expected an integer >= 3"),
        (lambda: Tokens([1, 2]).offset(1.5), r"offset\(o=1.5\): expected an integer"),  # type: ignore[arg-type]
        (lambda: Tokens([[1]]), r"the token ids of one sequence, \(n,\), got a int64 tensor of shape \(1, 1\)"),  # type: ignore[list-item]
    ):
        with pytest.raises(ShapeError, match=message):
            call()
    with pytest.raises(DTypeError, match="expected token ids, a tensor or a list, got str"):
        Tokens("ab")  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="the number of each token's word"):
        Tokens([1], words=["a"])  # type: ignore[list-item]
    source, target = Tokens([1, 2, 3]), Tokens([1, 2])
    with pytest.raises(ShapeError, match=r"a query in \[0, 2\]; there are 0 to 1"):
        aligned([(0, 0), (2, 1)], target, source)
    assert listed(aligned([(1, 2)], target, source)) == [(1, 2)]
