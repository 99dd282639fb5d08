"""What heads do: relations between tokens, and the roles that scores on them add up to."""

from clearhead.heads.relations import RelationMass
from clearhead.heads.roles import ROLES, Head, HeadTable, role_of

__all__ = ["ROLES", "Head", "HeadTable", "RelationMass", "role_of"]
