"""The page as the output of a notebook's cell: a frame that holds the file, and turns live while the kernel runs.

What is saved with the notebook is all of it: without a kernel, and without a widget of any kind, it shows what the file
shows. A widget's view in its place would leave "model not found" in a notebook that is opened again.
"""

from __future__ import annotations

import html
import secrets
from collections.abc import Sequence

from clearhead.page.answers import Answers
from clearhead.page.shell import outside

__all__ = ["cell"]

_CELL = """<iframe data-clearhead="{token}" title="clearhead: {title}" srcdoc="{page}" \
style="width:100%;height:640px;border:0" sandbox="allow-scripts allow-downloads"></iframe>
<pre>{summary}

The page is shown where a notebook may run scripts: in JupyterLab, once it is trusted, and on nbviewer.</pre>
<script>{{
{theme}
for (const frame of document.querySelectorAll('iframe[data-clearhead="{token}"]')) {{
  frame.nextElementSibling.hidden = true;
  followTheme(frame);
}}
}}</script>
{note}"""


def cell(page: str, title: str, answers: Answers, summary: Sequence[str]) -> str:
    """HTML: the page in a frame. Where nothing may draw itself, on GitHub, the lines of the summary.

    Args: page: a whole document. title: the model's name. answers: what the page asks while these are there, and
    somebody runs the kernel.
    """
    token = secrets.token_hex(8)
    note = _connected(answers, token, title)
    return _CELL.format(
        token=token,
        title=html.escape(title),
        page=html.escape(page),
        summary=html.escape("\n".join(summary)),
        theme=outside("theme.js"),
        note=note and f'<p style="font-size:85%;opacity:.8">{html.escape(note)}</p>',
    )


def _connected(answers: Answers, token: str, title: str) -> str:
    """Have the kernel answer the page; if it cannot, why not."""
    try:
        from clearhead.page.widget import Widget
    except ImportError as error:
        return f"This page shows what was saved of it: {error}"
    Widget(answers, title=title, token=token)
    return ""
