"""`look`: run a model on a text, keep the attention of every layer, and show it.

view = clearhead.look(model, tokenizer, "The cat sat on the mat.")
view.heads().strongest("induction")     # what the heads do, beside the uniform baseline
view.maps[17][0, 5, -1]                 # any weight, computed from q, k and one log-sum-exp per row
view.save("cat.html")                   # one file, no network
"""

from clearhead.looking.dispatch import look

__all__ = ["look"]
