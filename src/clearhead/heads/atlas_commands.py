"""What `clearhead heads` does and prints where a folder for an atlas is named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from torch import Tensor

from clearhead import terminal, zoo
from clearhead._plain import plain
from clearhead.arguments import check_file, stop
from clearhead.heads.atlas import atlas, check_folder
from clearhead.heads.atlas_table import Atlas
from clearhead.heads.atlas_workers import is_first
from clearhead.heads.corpus import check_documents
from clearhead.heads.tally import MEASURES

__all__ = ["show_atlas"]


def show_atlas(
    model: str,
    files: Sequence[Path],
    *,
    out: Path | None,
    resume: Path | None,
    workers: int,
    window: int | None,
    overlap: int | None,
    as_json: Path | None,
    strongest: int,
) -> None:
    """Make the atlas of a model over files, and print of each measure its mean and the heads where it is largest."""
    if not files:
        stop("an atlas is of a corpus: name its FILES")
    check_documents(files)  # before the model is loaded
    folder = check_folder(out, resume)
    check_file("--json", as_json)
    with terminal.progress() as report:
        loaded, tokenizer = zoo.load(model, on_progress=report)
        found = atlas(
            loaded,
            tokenizer,
            files,
            window=window,
            overlap=overlap,
            out=out,
            resume=resume,
            workers=workers,
            on_progress=report,
        )
    if not is_first():
        return
    _print(found, strongest)
    if as_json is not None:
        found.save(as_json)
        print(f"Wrote {plain(str(as_json))}")
    print(f"Wrote {plain(str(folder))}")


def _print(found: Atlas, strongest: int) -> None:
    out = terminal.console()
    heads = len(found.rows())
    out.print(f"{plain(found.model)}: {len(found.layers)} layers, {heads} heads", soft_wrap=True)
    windows = f"{found.windows:,} windows of {found.window:,}, overlap {found.overlap:,}"
    out.print(f"{found.tokens:,} tokens in {windows}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("Measure", "Unit", "All heads", "Uniform", "Largest in", "Mean"):
        table.add_column(heading, justify="right" if heading in ("All heads", "Uniform", "Mean") else "left")
    for name, measure in MEASURES.items():
        mean = found.mean(name)
        means = (f"{mean.nanmean():.2f}", f"{found.baseline(name).nanmean():.2f}")
        table.add_row(name, measure.unit, *means, *_head(mean, 0) if strongest else ())
        for n in range(1, min(strongest, heads)):
            table.add_row("", "", "", "", *_head(mean, n))
    terminal.print_table(out, table)


def _head(mean: Tensor, n: int) -> tuple[str, str]:
    """The head with the n-th largest mean, and that."""
    at = int(mean.nan_to_num(-1).flatten().argsort(descending=True, stable=True)[n])
    layer, head = divmod(at, mean.shape[1])
    return f"L{layer}H{head}", f"{mean[layer, head]:.2f}"
