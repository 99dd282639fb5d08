"""How a layer makes its queries from its input, and its output from what its heads bring: found in its matrices.

No list of names of modules: a matrix is W_Q if it gives the recorded queries of the layer's own input, for a few tokens
and every head, perhaps turned by position as rotary embeddings do. What fits nothing is not known, and says why.
"""

from clearhead.projections.find import Part, Projection, brought_by_heads, find
from clearhead.projections.watch import Watch, is_sequence, rows_of

__all__ = ["Part", "Projection", "Watch", "brought_by_heads", "find", "is_sequence", "rows_of"]
