"""What heads do: relations between tokens, the roles that scores on them add up to, and whether a head matters."""

from clearhead.heads.knocking import HeadMeans, Knockout, head_means, knockout
from clearhead.heads.relations import RelationMass
from clearhead.heads.roles import ROLES, Head, HeadTable, role_of
from clearhead.maps import rollout, value_weighted

__all__ = [
    "ROLES",
    "Head",
    "HeadMeans",
    "HeadTable",
    "Knockout",
    "RelationMass",
    "head_means",
    "knockout",
    "role_of",
    "rollout",
    "value_weighted",
]
