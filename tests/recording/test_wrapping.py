"""Replacements are counted and undone."""

from __future__ import annotations

import pytest

from clearhead.recording.wrapping import Replacement


class Base:
    def speak(self) -> str:
        return "base"


class Child(Base):
    pass


def louder(original):
    return lambda self: original(self).upper()


def test_the_last_holder_takes_it_back():
    original, replacement = Base.speak, Replacement(Base, "speak", louder)
    with replacement.held():
        with replacement.held():
            assert Base().speak() == "BASE"
        assert Base().speak() == "BASE"
    assert Base.speak is original


def test_an_exception_takes_it_back_too():
    original, replacement = Base.speak, Replacement(Base, "speak", louder)
    with pytest.raises(KeyError), replacement.held():
        raise KeyError
    assert Base.speak is original


def test_an_inherited_attribute_leaves_no_copy_behind():
    with Replacement(Child, "speak", louder).held():
        assert Child().speak() == "BASE"
    assert "speak" not in vars(Child)


def test_what_somebody_else_put_there_meanwhile_stays(monkeypatch):
    monkeypatch.setattr(Base, "speak", Base.speak)
    replacement = Replacement(Base, "speak", louder)
    with replacement.held():
        Base.speak = theirs = lambda self: "theirs"
    assert Base.speak is theirs
