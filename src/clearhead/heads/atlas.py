"""The atlas: what every head of a model does over a corpus of any size, in memory that does not grow with it.

    mean[m, l, h] = Σ_t x[m, l, h, t] / n    over all tokens t of the corpus, each counted once

x is the entropy of row t of head (l, h), the mean distance at which it looks, the weight that it gives to the window's
first key, to itself, to the token before it, or its largest weight.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead._progress import Progress as Report
from clearhead._progress import silent
from clearhead._version import __version__
from clearhead.errors import ModelError, RecordingError
from clearhead.heads import atlas_workers as workers_
from clearhead.heads.atlas_progress import Part, Progress, together
from clearhead.heads.atlas_table import FORMAT, Atlas
from clearhead.heads.corpus import Batch, Corpus, Document, check_documents
from clearhead.heads.tally import Tally
from clearhead.maps import AttentionMap, SoftmaxMap
from clearhead.recording import record
from clearhead.zoo import context_length
from clearhead.zoo.loading import frugal

__all__ = ["atlas", "check_folder", "tallies"]

WINDOW, OVERLAP = 1024, 4  # tokens, and the part of a window that is overlap, where not told
AT_ONCE = 4096  # tokens of a batch
SAVED = 30.0  # seconds between two states of progress on the disk


def atlas(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[Document],
    *,
    window: int | None = None,
    overlap: int | None = None,
    at_once: int = AT_ONCE,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    workers: int = 1,
    on_progress: Report | None = None,
) -> Atlas:
    """What every head does over a corpus of any size: sums, extremes and histograms, each token counted once.

    A document is cut into windows. A token is counted in the first that holds it: but in a document's first window, it
    has at least `overlap` tokens before it. Windows of about one length make a batch; padding counts nowhere.

    Sums are exact, so the order in which batches come changes no bit of the table; a run that was killed and goes on
    gives the same table. Processes share the batches: with `workers`, or where the call stands in a script under
    `torchrun`; then every process gets the whole table. Several processes have fewer threads each, whose sums inside a
    forward pass differ in the last bits: of a float64 model tables agree to 1e-12.

    Args:
        model: of transformers, and one that reads one text; in eval mode.
        tokenizer: its tokenizer. Special tokens that it puts around a text are put around each window, not counted.
        documents: texts (str) and files (Path) of UTF-8, of any length. Without workers also made one by one.
        window: tokens of a window; 1,024 or what the model reads, if that is less.
        overlap: tokens that a window shares with the one before; a quarter of it.
        at_once: tokens of a batch.
        out: a folder, new or empty, in which progress is kept, and the table in the end as atlas.json.
        resume: such a folder, to go on with; the documents must be the same, as far as they were read.
        workers: processes, each with a copy of the model and its part of the processor cores. A script that asks for
            more than one is run again by each: stand below `if __name__ == "__main__":`.
        on_progress: told ("atlas", bytes of text done, bytes of all), and ("skip", …) over what is done already.

    Returns: the table, frozen.

    Raises:
        ModelError: for a document that is empty, no text or not there (all are looked at before the model runs, as far
            as their first 64 kB), fewer than two tokens in all, windows longer than the model reads, a model that reads
            two texts, or in training mode. What was done before is kept in the folder.
        RecordingError: for a folder with the progress of another model, corpus, setting or version; one that is not
            empty (`out`) or holds no progress (`resume`); a worker that was killed.

    Cost: the forward pass without the head that predicts words, and about a fifth more (SmolLM2, windows of 1,024):
    one compiled pass over each map and its uniform head, and the sums. Memory: that of a batch, about 15 kB a head, 1
    MB of text, and windows of 16 batches.
    """
    documents = _checked(documents, workers)
    window, overlap = _sizes(model, window, overlap)
    corpus = Corpus(tokenizer, documents, window=window, overlap=overlap, at_once=at_once)
    weights = _digest_of(model)
    facts = {"format": FORMAT, "clearhead": __version__, "model": weights}
    facts |= {"window": window, "overlap": overlap, "at_once": at_once}
    folder = check_folder(out, resume)
    if workers > 1 and not workers_.is_shared():
        if folder is not None:
            Progress(folder, facts)  # what does not fit is said here
        settings = {"window": window, "overlap": overlap, "at_once": at_once, "resume": folder}
        made: Atlas = workers_.spread(workers, atlas, (model, tokenizer, documents), settings, on_progress or silent)
        return made
    with workers_.shared() as (rank, world):
        progress = None if folder is None else Progress(folder, facts)
        workers_.wait()  # all have read the folder before one writes
        run = _Run(model, corpus, window, Part(world, rank), progress, on_progress or silent)
        with workers_.ended_in_order():
            total = run.all()
        parts = [*(progress.parts if progress else []), *workers_.gathered(run.part)]
        whole = _whole(parts, total, folder)
    sums = whole.windows, whole.tokens, tuple(whole.layers), tuple(whole.uniform)
    found = Atlas(_name(model), weights, window, overlap, *sums)
    if folder is not None and rank == 0:
        found.save(folder / "atlas.json")
    return found


class _Run:
    """One process's way through the corpus."""

    def __init__(
        self, model: nn.Module, corpus: Corpus, window: int, part: Part, progress: Progress | None, report: Report
    ) -> None:
        self.part = part
        self._model, self._corpus, self._window, self._progress, self._report = model, corpus, window, progress, report
        self._earlier = progress.parts if progress else []
        self._saved = time.monotonic()

    def all(self) -> int:
        """Go through all batches; how many there are. What is done is written, whatever happens."""
        total = 0
        try:
            for number, batch in enumerate(self._corpus.batches()):
                total = number + 1
                self._check(total)
                done = any(part.has(number) for part in self._earlier)
                if not done and number % self.part.step == self.part.offset:
                    self._count(number, batch)
                self._report("skip" if done else "atlas", self._corpus.done, self._corpus.nbytes)
        finally:
            if self._progress is not None:
                self._progress.write(self.part)
        if any(part.upto > total for part in self._earlier):
            raise self._other()
        return total

    def _check(self, upto: int) -> None:
        """Hold what was read so far to what earlier runs have read."""
        if any(part.upto == upto and part.digest != self._corpus.digest for part in self._earlier):
            raise self._other()

    def _other(self) -> RecordingError:
        return RecordingError(
            "the documents are not those that this folder's progress was made of: they differ before the place where it"
            " ended. Give the same documents in the same order, or name another folder; nothing was changed."
        )

    def _count(self, number: int, batch: Batch) -> None:
        heads, even = tallies(self._model, batch, self._window)
        sizes = batch.ids.shape[0], int(batch.counted.sum())
        more = Part(self.part.step, self.part.offset, number + 1, self._corpus.digest, 1, *sizes, heads, even)
        self.part = together([self.part, more])
        if self._progress is not None and time.monotonic() - self._saved > SAVED:
            self._progress.write(self.part)
            self._saved = time.monotonic()


@torch.no_grad()
def tallies(model: nn.Module, batch: Batch, window: int) -> tuple[list[Tally], list[Tally]]:
    """Of one batch, layer by layer, the tallies of the heads and of the uniform head; each map is reduced when made."""
    there = next(model.parameters()).device
    given = {"input_ids": batch.ids.to(there)}
    if not bool(batch.real.all()):
        given["attention_mask"] = batch.real.long().to(there)
    reader: Any = getattr(model, "base_model", model)  # without the head that predicts words: nobody looks at it

    baselines: list[tuple[SoftmaxMap, Tally]] = []

    def keep(name: str, attn: AttentionMap) -> tuple[Tally, Tally]:
        return Tally.of(_numbers(attn, batch.counted), window), even_of(attn)

    def even_of(attn: AttentionMap) -> Tally:
        even = (attn[:, :1] if attn.heads_alike else attn).uniform()
        for known, tally in baselines:  # most models have one mask for all layers, or two
            if _alike(known, even):
                return tally
        tally = Tally.of(_numbers(even, batch.counted), window)
        if isinstance(even, SoftmaxMap):
            baselines.append((even, tally))
        return tally

    with record(reader, keep=keep) as recording:
        reader(**given, **frugal(reader))
    heads, even = zip(*recording.results.values(), strict=True)
    return list(heads), list(even)


def _alike(one: SoftmaxMap, other: AttentionMap) -> bool:
    """Whether two uniform heads are known to be the same."""
    if not isinstance(other, SoftmaxMap) or one.shape != other.shape or one.bias is not None or other.bias is not None:
        return False
    if one.mask is None or other.mask is None:
        return one.mask is other.mask
    tensors = zip(one.mask.tensors(), other.mask.tensors(), strict=False)
    return repr(one.mask) == repr(other.mask) and all(torch.equal(a, b) for a, b in tensors)


def _numbers(attn: AttentionMap, counted: Tensor) -> Tensor:
    """What the measures are of every counted query, (M, H, n), on the CPU; NaN where there is none."""
    if len(attn.shape) != 4 or attn.shape[0::2] != counted.shape or attn.shape[2] != attn.shape[3]:
        raise ModelError(
            f"{attn!r} is not the self-attention of {tuple(counted.shape)} tokens: an atlas has no place for it."
        )
    found = attn.statistics()
    if not bool(torch.isfinite(found.entropy).all()):
        raise ModelError("its attention weights are not finite: look at the model's weights and its dtype.")
    nothing = found.peak == 0
    previous = F.pad(attn.diagonal(-1), (1, 0), value=math.nan)
    rows = [found.entropy, found.distance, found.to_first, found.to_self, previous, found.peak]
    shown = torch.stack([row.masked_fill(nothing, math.nan).cpu() for row in rows])  # (M, B, H, T)
    return shown.transpose(1, 2)[:, :, counted]


# --- what is given ----------------------------------------------------------------------------------------------------


def _checked(documents: Any, workers: object) -> Iterable[Document]:
    if isinstance(documents, (str, Path)):
        given = repr(documents)[:40]
        raise ModelError(f"atlas(model, tokenizer, {given}): expected a list of texts and files, [{given}].")
    if not isinstance(documents, Iterable):
        kind = type(documents).__name__
        raise ModelError(f"atlas(model, tokenizer, {kind}): expected texts (str) and files (pathlib.Path), in a list.")
    if not isinstance(workers, int) or workers < 1:
        raise ModelError(f"atlas(…, workers={workers!r}): expected at least one process.")
    if workers > 1 and not isinstance(documents, Sequence):
        documents = list(documents)
    if isinstance(documents, Sequence):
        check_documents(documents)
    found: Iterable[Document] = documents
    return found


def _sizes(model: object, window: int | None, overlap: int | None) -> tuple[int, int]:
    if not isinstance(model, nn.Module):
        raise ModelError(f"atlas({model!r}, …): expected a torch.nn.Module; clearhead.zoo.load makes one of a name.")
    longest = context_length(model)
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" not in accepted:
        raise ModelError(f"atlas: {_name(model)} reads no text: its forward takes no input_ids.")
    if "decoder_input_ids" in accepted:
        raise ModelError(f"atlas: {_name(model)} reads two texts; an atlas is of models that read one.")
    if model.training:
        raise ModelError(f"atlas: {_name(model)} is in training mode, where dropout is drawn anew: call model.eval().")
    for name, value in (("window", window), ("overlap", overlap)):
        if not isinstance(value, int | None):
            raise ModelError(f"atlas(…, {name}={value!r}): expected a whole number of tokens.")
    window = min(WINDOW, longest or WINDOW) if window is None else window
    if longest is not None and window > longest:
        raise ModelError(f"atlas(…, window={window}): {_name(model)} reads {longest} tokens at most.")
    return window, window // OVERLAP if overlap is None else overlap


def check_folder(out: str | Path | None, resume: str | Path | None) -> Path | None:
    """The folder of one of the two, None of none. Raises RecordingError for one that is not as it is to be."""
    if out is not None and resume is not None:
        raise RecordingError("atlas(…, out=…, resume=…): give one of the two: a new folder, or one to go on with.")
    if resume is not None and not any(Path(resume).glob("part-*.json")) and not workers_.is_shared():
        raise RecordingError(f"there is no progress of an atlas in {resume}: begin with out={str(resume)!r}.")
    if out is not None and Path(out).is_dir() and any(Path(out).iterdir()):
        raise RecordingError(f"the folder {out} is not empty: go on with resume={str(out)!r}, or name a new one.")
    named = out if out is not None else resume
    if named is not None:
        _check_place(Path(named))
    return None if named is None else Path(named)


def _check_place(folder: Path) -> None:
    """Refuse what is no folder, and cannot become one, or be written to: before the model runs."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise RecordingError(f"cannot make the folder {folder}: {there} is a file. Name another.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RecordingError(f"cannot write to the folder {there}: name another than {folder}.")


def _digest_of(model: nn.Module) -> str:
    """Of names, shapes, and at most 4,096 numbers of every weight: of another checkpoint it is another."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, x in model.state_dict().items():
        some = x.detach().flatten()[:: max(1, x.numel() // 4096)].double().cpu().contiguous()
        digest.update(f"{name}{tuple(x.shape)}{x.dtype}".encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]


def _whole(parts: Sequence[Part], total: int, folder: Path | None) -> Part:
    """All parts together, if they are all batches, each once."""
    if not any(part.tokens for part in parts) or sum(part.tokens for part in parts) < 2:
        raise ModelError("the documents are one token together, which can only attend to itself: give more text.")
    whole = together(parts)
    if whole.batches != total:
        raise RecordingError(
            f"{folder} holds {whole.batches} batches, and the documents make {total}: two runs have worked in it at"
            " once. Begin anew in another folder, with one."
        )
    return whole


def _name(model: nn.Module) -> str:
    path = getattr(getattr(model, "config", None), "name_or_path", "")
    return Path(path).name if path else type(model).__name__
