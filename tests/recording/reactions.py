"""Chemical reactions whose atom maps are known, read from `tests/data/reactions.tsv` without a chemistry library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ATOM = re.compile(r"\[[^\]]+\]|Br|Cl|[BCNOPSFIbcnops]")
_PIECE = re.compile(rf"{ATOM.pattern}|[()=#.\-\d]")
_PLAIN = re.compile(r"\[(Br|Cl|c|[BCNOPSFIos]|n(?!H))(?:H\d?)?:\d+\]")  # brackets that stand for a map alone


@dataclass(frozen=True)
class Molecules:
    """The atoms of a SMILES string in its order, and the bonds between them."""

    smiles: str

    @property
    def atoms(self) -> list[str]:
        """Each atom as it is written."""
        return ATOM.findall(self.smiles)

    @property
    def elements(self) -> list[str]:
        """Each atom's element."""
        found = (re.match(r"\[?(Br|Cl|[A-Z][a-gi-z]?|[bcnops])", atom) for atom in self.atoms)
        return [one[1].capitalize() for one in found if one]

    @cached_property
    def bonds(self) -> dict[frozenset[int], str]:
        """Pairs of atoms that are bonded, and how: "" single or aromatic, "=", "#"."""
        bonds: dict[frozenset[int], str] = {}
        last, order, atom = -1, "", -1
        branches: list[int] = []
        rings: dict[str, int] = {}
        for piece in _PIECE.findall(self.smiles):
            other = -1
            if piece == "(":
                branches.append(last)
            elif piece == ")":
                last = branches.pop()
            elif piece == ".":
                last = -1
            elif piece in "=#-":
                order = piece.strip("-")
            elif piece.isdigit():
                other = rings.pop(piece, -1)
                if other < 0:
                    rings[piece] = last
            else:
                atom, other = atom + 1, last
                last = atom
            if other >= 0:
                bonds[frozenset((other, last))], order = order, ""
        return bonds

    def kinds(self) -> list[int]:
        """A number for each atom; those that a symmetry exchanges have the same (Weisfeiler and Lehman 1968)."""
        kinds: list[object] = list(self.atoms)
        for _ in kinds:
            around = [
                sorted((order, kinds[next(iter(pair - {i}))]) for pair, order in self.bonds.items() if i in pair)
                for i in range(len(kinds))
            ]
            signed = [repr(both) for both in zip(kinds, around, strict=True)]
            numbers = {one: f"{n:03}" for n, one in enumerate(sorted(set(signed)))}
            kinds = [numbers[one] for one in signed]
        return [int(str(kind)) for kind in kinds]


@dataclass(frozen=True)
class Reaction:
    """A reaction with atom maps, and how many bonds it makes between mapped atoms."""

    name: str
    made: int
    mapped: str

    @property
    def smiles(self) -> str:
        """The reaction without maps: what goes into a model."""
        return re.sub(r":\d+\]", "]", _PLAIN.sub(r"\1", self.mapped))

    @property
    def sides(self) -> list[Molecules]:
        """Reactants with reagents, and the product."""
        return [Molecules(side) for side in self.smiles.split(">>")]

    @property
    def gold(self) -> list[int]:
        """For each atom of the product, which of the reactants' atoms it was."""
        left, right = ([_number(atom) for atom in ATOM.findall(side)] for side in self.mapped.split(">>"))
        return [left.index(number) for number in right]


def _number(atom: str) -> int:
    found = re.search(r":(\d+)\]", atom)
    return int(found[1]) if found else 0


def read() -> list[Reaction]:
    """All of them."""
    lines = (Path(__file__).parents[1] / "data" / "reactions.tsv").read_text("utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return [Reaction(name, int(made), mapped) for name, made, mapped in rows]
