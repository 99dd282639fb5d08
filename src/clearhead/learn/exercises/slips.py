"""What to say where PyTorch refuses the learner's code: pairs (pattern of the error and its line, sentence)."""

from __future__ import annotations

__all__ = ["BATCHES", "HEADS", "LAYERS", "PRODUCTS"]

Slips = tuple[tuple[str, str], ...]

PRODUCTS: Slips = (
    (
        r"size of tensor a .*\n.*[^*]\*[^*]",
        "The sign * multiplies number by number and takes one shape. Vectors are mixed by a product: weights @ v.",
    ),
    (
        r"cannot be multiplied \(\d+x(\d+) and \d+x\1\)\n(?!.*(T\b|weight))|of batch2 tensor.*\n(?!.*transpose)",
        "A product takes rows of the first and columns of the second. Scores compare rows with rows: turn the second,"
        " q @ k.T, or with more than two dimensions q @ k.transpose(-2, -1).",
    ),
    (r"softmax\(\) missing", "Say along what the shares add up to 1: over the keys, the last dimension, dim=-1."),
)
LAYERS: Slips = (
    (
        r"'Linear'|not Linear",
        "An nn.Linear is no matrix, it holds one. Call it like a function: self.W_query(x) multiplies every row of x.",
    ),
    (
        r"cannot be multiplied.*\n.*\.weight",
        "An nn.Linear keeps its matrix transposed. Call the layer, self.W_query(x), and it sees to that.",
    ),
    *PRODUCTS,
    (
        r"cannot be multiplied|of batch2 tensor",
        "In a product each row of the first needs as many numbers as the second has rows. Are both projected, q ="
        " W_query(x) and k = W_key(x), or is one of them x itself?",
    ),
)
BATCHES: Slips = (
    (
        r"size of tensor a .*\n.*\.T\b",
        "With more than two dimensions .T turns them all, texts and heads too. Turn the last two: k.transpose(-2, -1).",
    ),
    *LAYERS,
)
HEADS: Slips = (
    (r"(view|reshape)\(\).*float|'float' object", "A head is a whole number wide: divide with //, not with /."),
    (
        r"is invalid for input",
        "view only groups anew the numbers there are. Is it a projection that is cut, W_query(x), and not x itself?",
    ),
    (
        r"values to unpack \(expected [34]|cannot be multiplied.*\n.*out_proj",
        "Each once and in this order: project x, split_heads to (B, H, T, D), attend, merge_heads to (B, T, H·D),"
        " out_proj.",
    ),
)
