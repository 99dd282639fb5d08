"""What heads do: relations between tokens, the roles that scores on them add up to, and whether a head matters."""

from clearhead.heads.atlas import atlas
from clearhead.heads.atlas_table import Atlas
from clearhead.heads.comparing import Comparison, HeadChange, compare
from clearhead.heads.effects import Effect, HeadLoss, Importance, effect, importance
from clearhead.heads.judging import ROLES, Judgement, judge, role_of
from clearhead.heads.knocking import HeadMeans, Knockout, head_means, knockout
from clearhead.heads.losses import in_context_score
from clearhead.heads.pairs import Pairs, Tokens, aligned
from clearhead.heads.probing import probe, repeated_tokens, score_recording
from clearhead.heads.roles import LayerScores, Scorer, pooled, score_layer
from clearhead.heads.scoring import RelationScore, relation_score
from clearhead.heads.syntax import Parse
from clearhead.heads.table import Head, HeadTable
from clearhead.maps import rollout, value_weighted

__all__ = [
    "ROLES",
    "Atlas",
    "Comparison",
    "Effect",
    "Head",
    "HeadChange",
    "HeadLoss",
    "HeadMeans",
    "HeadTable",
    "Importance",
    "Judgement",
    "Knockout",
    "LayerScores",
    "Pairs",
    "Parse",
    "RelationScore",
    "Scorer",
    "Tokens",
    "aligned",
    "atlas",
    "compare",
    "effect",
    "head_means",
    "importance",
    "in_context_score",
    "judge",
    "knockout",
    "pooled",
    "probe",
    "relation_score",
    "repeated_tokens",
    "role_of",
    "rollout",
    "score_layer",
    "score_recording",
    "value_weighted",
]
