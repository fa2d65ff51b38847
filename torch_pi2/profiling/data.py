"""Converts calibration data of any usual form into batches whose rows are *different* sequences.

The profile's batch frequencies (how likely a neuron fires for at least one of k sequences decoded together) are unions
over rows, and neighbouring text would make them too low.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import Field, argument
from torch_pi2.errors import CalibrationError
from torch_pi2.store.trust import tokenizer_of
from torch_pi2.types.config import Config

#: Minimum number of real tokens for calibration.
MIN_TOKENS = 64
#: Minimum number of sequences that predictors are fitted to and measured on.
MIN_SEQUENCES = 10

#: Batches of a stream that are filled together, so that neighbouring windows go into different ones.
_BATCHES_AHEAD = 32

_FORMS = "a str, a list of str, integer ids [N, T], or an iterable of id tensors, dicts or tuples of arguments"


def last_token(ids_BT: torch.Tensor) -> int | torch.Tensor:
    """``logits_to_keep`` for the last token: of several sequences an index, since a slice is no contiguous matrix,
    whose product in bfloat16 takes torch 300 times as long.
    """
    return torch.tensor([-1]) if min(ids_BT.shape) > 1 else 1


@dataclass
class Batch:
    """One call of the model: ``input_ids [B, T]`` int64, or None and ``args``; ``kwargs`` are always passed.
    ``mask_BT``: bool, True for real tokens; None if the token grid is unknown.
    """

    input_ids: torch.Tensor | None
    mask_BT: torch.Tensor | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """Real tokens (padding excluded), 0 if unknown."""
        return 0 if self.mask_BT is None else int(self.mask_BT.sum())

    def on_the_cpu(self) -> "Batch":
        fields = (self.input_ids, self.mask_BT, self.args, self.kwargs)
        return Batch(*tree_map_only(torch.Tensor, torch.Tensor.cpu, fields))

    def call(self, model: nn.Module, *, logits: bool = True) -> Any:
        """``logits``: False computes them for the last token only, where the model can."""
        args, kwargs = self.arguments(model)
        if not logits and "logits_to_keep" in inspect.signature(model.forward).parameters:
            kwargs.setdefault("logits_to_keep", 1 if self.input_ids is None else last_token(self.input_ids))
        return model(*args, **kwargs)

    def arguments(self, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of :meth:`call` that the ``forward`` of ``model`` takes; a decoder gets its encoder's ids."""
        if self.input_ids is None:
            return self.args, dict(self.kwargs)
        names = inspect.signature(model.forward).parameters
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values())
        kwargs = dict(self.kwargs)
        if "use_cache" in names:
            kwargs.setdefault("use_cache", False)  # keys and values of calibration text are never read again
        padded = self.mask_BT is not None and not bool(self.mask_BT.all())
        if padded and "attention_mask" in names:
            assert self.mask_BT is not None
            kwargs["attention_mask"] = self.mask_BT.long()
        encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        if encoder_decoder and not any(name.startswith("decoder_input") for name in kwargs):
            kwargs["decoder_input_ids"] = self.input_ids
        if "input_ids" in names or (open_ended and len(names) == 1):
            return (), {"input_ids": self.input_ids, **kwargs}
        return (self.input_ids,), kwargs


def batches(
    data: Any,
    *,
    tokenizer: Callable[..., Any] | None = None,
    batch_size: int = 8,
    seq_len: int = 128,
    least: int = MIN_TOKENS,
    opening: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Convert calibration ``data`` into batches, one at a time; rows of a batch lie far apart in a text.

    Args:
        data: a text or a list of texts (both need ``tokenizer``); integer ids ``[N, T]``; or an iterable (a
            ``DataLoader`` or ``Dataset``, too) of ids ``[T]`` (grouped and right-padded), ids ``[B, T]``, dicts of
            model arguments (``input_ids``, optionally ``attention_mask`` and others), or tuples (or lists of tensors)
            of positional arguments; a tuple of one tensor of ids is ids.
        tokenizer: a Hugging Face tokenizer, or anything that maps a str to ids or to ``{"input_ids": ids}``.
        batch_size: rows per batch of texts and ids ``[T]`` or ``[N, T]``.
        seq_len: maximum tokens per row of these; longer ones are cut into windows.
        opening: ids (BOS) with which every window of a text or of ids begins if the first one does; None: those that
            ``tokenizer`` puts before a text.

    Raises:
        CalibrationError: fewer than ``least`` real tokens, text without a tokenizer, ids that are not integers, or
            another form.
    """
    opening = list(opening_of(tokenizer) if opening is None else opening)
    if batch_size < 1 or seq_len < 2 or seq_len <= len(opening):
        expected = f"batch_size >= 1 and seq_len >= {max(2, len(opening) + 1)}"
        found = f"batch_size={batch_size}, seq_len={seq_len}"
        raise CalibrationError("calibration batches", expected=expected, found=found, fix="The defaults are 8 and 128.")
    total = 0
    known = True
    for batch in _normalise(data, tokenizer, batch_size, seq_len, opening):
        known &= batch.mask_BT is not None
        total += batch.n_tokens
        yield batch.on_the_cpu()
    if known and total < least:
        what, expected = "calibration data", f"at least {MIN_TOKENS} tokens (a few thousand are better)"
        fix = "Pass more text; torch_pi2.profiling.text.stdlib_text('train') needs no download."
        raise CalibrationError(what, expected=expected, found=f"{total} tokens" if total else "none", fix=fix)


def calibration_batches(
    model: nn.Module, data: Any, tokenizer: Any, config: Config, least: int = MIN_TOKENS
) -> list[Batch]:
    """About ``config.calibration_tokens`` tokens of ``data``, as a list of batches.

    A batch whose tokens cannot be counted is taken as full, so that an endless stream ends. ``tokenizer`` defaults to
    the one beside the model's weights; without one, ``opening`` is the model's ``bos_token_id``. Windows are no longer
    than the model has positions. Raises CalibrationError: as :func:`batches`, and :func:`check_ids`.
    """
    text = data[0] if isinstance(data, list | tuple) and data else data
    if tokenizer is None and isinstance(text, str):
        tokenizer = tokenizer_of(model, None, "calibration text", CalibrationError)
    kept: list[Batch] = []
    tokens = 0
    opening = numbers_of(model, "bos_token_id") if tokenizer is None else None
    seq_len = min([config.seq_len, *numbers_of(model, "max_position_embeddings")])
    shape: dict[str, Any] = {"batch_size": config.batch_size, "seq_len": seq_len, "opening": opening, "least": least}
    for batch in batches(data, tokenizer=tokenizer, **shape):
        check_ids(model, batch)
        kept.append(batch)
        tokens += batch.n_tokens or config.batch_size * config.seq_len
        if tokens >= config.calibration_tokens:
            break
    return kept


def numbers_of(model: nn.Module, name: str) -> list[int]:
    """The number ``name`` in the text part of the configuration of ``model``, in a list; empty: there is none."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found = getattr(config, name, None)
    return [found] if isinstance(found, int) and found >= 0 else []


def check_ids(model: nn.Module, batch: Batch) -> None:
    """Raises CalibrationError: ids outside the vocabulary of ``model``, or more than it has positions for."""
    ids_BT = batch.input_ids
    if ids_BT is None or not ids_BT.numel():
        return
    low, high = int(ids_BT.min()), int(ids_BT.max())
    for vocabulary in numbers_of(model, "vocab_size"):
        if low < 0 or high >= vocabulary:
            ids = Field(ids_BT, "calibration token ids", "Use the model's own tokenizer.", CalibrationError)
            ids.wrong(f"0 to {vocabulary - 1} (the model's vocabulary)", f"{low} to {high}")
    for positions in numbers_of(model, "max_position_embeddings"):
        if ids_BT.shape[1] > positions:
            what = "tokens of a calibration sequence"
            expected = f"at most {positions}, the positions that the model has (max_position_embeddings)"
            fix = "Choose a smaller seq_len; dicts and ids [B, T] of an iterable are not cut: pass shorter ones."
            raise CalibrationError(what, expected=expected, found=str(ids_BT.shape[1]), fix=fix)


def _normalise(data: Any, tokenizer: Any, batch_size: int, seq_len: int, opening: list[int]) -> Iterator[Batch]:
    data = [data] if isinstance(data, str | Batch | Mapping) else data
    if isinstance(data, (list, tuple)) and data and all(isinstance(text, str) for text in data):
        windows = [w for text in data for w in _windows(_encode(text, tokenizer), seq_len, opening)]
        yield from _spread_out(windows, batch_size, getattr(tokenizer, "pad_token_id", None) or 0)
    elif isinstance(data, torch.Tensor):
        ids_NT = _check_ids(data, "calibration ids")
        rows = [ids_NT] if ids_NT.dim() == 1 else ids_NT
        yield from _spread_out([w for ids in rows for w in _windows(ids, seq_len, opening)], batch_size)
    else:
        yield from _from_items(data, tokenizer, batch_size, seq_len, opening)


def _only_text(item: Any) -> bool:
    leaves = tree_leaves(item)
    tensors = any(isinstance(value, torch.Tensor) for value in leaves) or "input_ids" in item
    return not tensors and any(isinstance(value, str) for value in leaves)


def _form_error(item: Any) -> CalibrationError:
    texts = isinstance(item, Mapping | tuple | list) and _only_text(item)
    chats = "[tokenizer.apply_chat_template(row['messages'], tokenize=False) for row in data]"
    other = "Convert it, or wrap the model's positional arguments of each call in a tuple."
    fix = f"Pass [row['text'] for row in data], or for chats {chats}." if texts else other
    found = f"{type(item).__name__}{' with text' * texts}"
    return CalibrationError("form of the calibration data", expected=_FORMS, found=found, fix=fix)


def _are_ids(values: Any) -> bool:
    if not isinstance(values, torch.Tensor):
        return False
    floats = values.is_floating_point() or values.is_complex() or values.dtype is torch.bool
    return not floats and values.dim() in (1, 2)


def _check_ids(ids: torch.Tensor, what: str) -> torch.Tensor:
    if not _are_ids(ids):
        fix = "Tokenise the text first; inputs that are not ids go in tuples of the model's arguments."
        found = f"{dtype_name(ids.dtype)} {tuple(ids.shape)}"
        Field(ids, what, fix, CalibrationError).wrong("integer token ids [T] or [N, T]", found)
    return ids.long()


def _encode(text: str, tokenizer: Any) -> torch.Tensor:
    if tokenizer is None:
        fix = "Pass tokenizer=AutoTokenizer.from_pretrained(...) or ids instead of text."
        Field(None, "calibration text", fix, CalibrationError).wrong("a tokenizer to go with it", "tokenizer=None")
    if not callable(tokenizer):
        argument(tokenizer, "tokenizer").wrong("a tokenizer: called with a text, it gives its ids")
    found = tokenizer(text)
    if isinstance(found, Mapping) or hasattr(found, "input_ids"):
        found = found["input_ids"]
    found = getattr(found, "ids", found)  # of a tokenizers.Encoding
    ids = torch.as_tensor(found)
    return ids.long().reshape(-1) if not ids.numel() else _check_ids(ids, "ids from the tokenizer").reshape(-1)


def opening_of(tokenizer: Any) -> list[int]:
    """Ids that ``tokenizer`` puts before every text: BOS, if it does. Every window of a text begins with them."""
    if not callable(tokenizer):
        return []
    texts = [_encode(text, tokenizer).tolist() for text in ("", "a", "1")]
    return [ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, zip(*texts))]


def cut(ids: torch.Tensor, n: int, opening: Sequence[int]) -> list[torch.Tensor]:
    """Parts of ``n`` ids, the last one shorter, each after ``opening``; ``ids`` come without it."""
    return [torch.cat((ids.new_tensor(opening), part)) for part in ids.split(n) if len(part)]


def without_opening(ids: torch.Tensor, opening: Sequence[int]) -> torch.Tensor:
    """``ids`` from where they no longer begin with ``opening``: a chat template writes BOS, and the tokenizer again."""
    while opening and ids[: len(opening)].tolist() == list(opening):
        ids = ids[len(opening) :]
    return ids


def _windows(ids: torch.Tensor, seq_len: int, opening: list[int]) -> list[torch.Tensor]:
    """Parts of at most ``seq_len`` tokens, without a single token at the end; all begin with ``opening`` or none."""
    rest = without_opening(ids, opening)
    parts = cut(rest, seq_len, ()) if len(rest) == len(ids) else cut(rest, seq_len - len(opening), opening)
    return [part for i, part in enumerate(parts) if len(part) > 1 or not i]


def _from_dict(item: Mapping[str, Any]) -> Batch:
    kwargs = dict(item)
    ids = kwargs.pop("input_ids", None)
    mask = kwargs.pop("attention_mask", None)
    kwargs.pop("labels", None)  # a training loader's; the loss is ours to take
    if ids is None:
        first = next((v for v in kwargs.values() if isinstance(v, torch.Tensor)), None)
        if mask is not None:
            kwargs["attention_mask"] = mask
        grid = _grid(first) if mask is None else torch.as_tensor(mask).bool()
        return Batch(None, grid, (), kwargs)
    ids_BT = _check_ids(torch.as_tensor(ids), "input_ids")
    ids_BT = ids_BT.reshape(1, -1) if ids_BT.dim() == 1 else ids_BT
    mask_BT = torch.ones_like(ids_BT).bool() if mask is None else torch.as_tensor(mask).bool()
    if mask_BT.numel() != ids_BT.numel():
        given = Field(mask, "attention_mask", "Pass the tokenizer's mask of these ids, or none.", CalibrationError)
        given.wrong(f"one for every id, {tuple(ids_BT.shape)}", f"{tuple(mask_BT.shape)}")
    mask_BT = mask_BT.reshape(ids_BT.shape)
    return Batch(ids_BT, mask_BT, (), kwargs)


def _grid(first: torch.Tensor | None) -> torch.Tensor | None:
    """Token grid of a call without a mask: ids ``[B, T]``, features ``[B, T, H]`` or ``[N, H]`` (N sequences)."""
    if first is None or first.dim() == 0:
        return None
    shape = first.shape[:-1] if first.is_floating_point() else first.shape
    if len(shape) not in (1, 2):
        return None
    size = (shape[0], 1) if len(shape) == 1 and first.is_floating_point() else shape
    return torch.ones(size if len(size) == 2 else (1, size[0]), dtype=torch.bool)


def _from_items(data: Any, tokenizer: Any, batch_size: int, seq_len: int, opening: list[int]) -> Iterator[Batch]:
    try:  # a map-style Dataset ends by its length, not by an IndexError
        by_index = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "__iter__")
        items = (data[i] for i in range(len(data))) if by_index else iter(data)
    except TypeError as error:
        raise _form_error(data) from error
    waiting: list[torch.Tensor] = []
    for item in items:
        if isinstance(item, tuple | list) and len(item) == 1 and _are_ids(item[0]):
            item = item[0]  # as TensorDataset gives it
        if isinstance(item, list) and item and all(isinstance(value, torch.Tensor) for value in item):
            item = tuple(item)  # as DataLoader gives it
        if isinstance(item, Batch):
            yield item
        elif isinstance(item, Mapping | tuple) and _only_text(item):
            raise _form_error(item)
        elif isinstance(item, Mapping):
            yield _from_dict(item)
        elif isinstance(item, tuple):
            first = next((v for v in item if isinstance(v, torch.Tensor)), None)
            yield Batch(None, _grid(first), item, {})
        elif isinstance(item, torch.Tensor) and item.dim() == 2:
            yield _from_dict({"input_ids": item})
        elif isinstance(item, (torch.Tensor, str)) or (isinstance(item, list) and item and isinstance(item[0], int)):
            ids = _encode(item, tokenizer) if isinstance(item, str) else _check_ids(torch.as_tensor(item), "ids")
            waiting += _windows(ids, seq_len, opening)
            if len(waiting) >= _BATCHES_AHEAD * batch_size:
                yield from _spread_out(waiting, batch_size)
                waiting = []
        else:
            raise _form_error(item)
    yield from _spread_out(waiting, batch_size)


def _spread_out(rows: Sequence[torch.Tensor], batch_size: int, pad: int = 0) -> Iterator[Batch]:
    """Batches whose rows lie far apart in ``rows``, neighbouring windows of one text."""
    n_batches = -(-len(rows) // batch_size)
    for b in range(n_batches):
        ids_BT = pad_sequence(list(rows[b::n_batches]), batch_first=True, padding_value=pad)
        mask_BT = [torch.ones_like(row, dtype=torch.bool) for row in rows[b::n_batches]]
        yield Batch(ids_BT, pad_sequence(mask_BT, batch_first=True))


def digest(values: Any) -> str:
    """Hash of nested tensors, batches, numbers and texts."""
    found = hashlib.sha256()
    plain = [list(vars(value).values()) if isinstance(value, Batch) else value for value in tree_leaves(values)]
    for value in tree_leaves(plain):
        if isinstance(value, torch.Tensor):
            found.update(str((tuple(value.shape), value.dtype)).encode())
            found.update(value.reshape(-1).contiguous().view(torch.uint8).numpy().data)
        else:
            found.update(repr(value).encode())
    return found.hexdigest()[:16]


def rows_of(data: list[Batch]) -> list[Batch]:
    """One batch per sequence; a batch that cannot be split counts as one sequence."""
    rows: list[Batch] = []
    for batch in data:
        ids, mask = batch.input_ids, batch.mask_BT
        if ids is None or mask is None or batch.kwargs:
            rows.append(batch)
        else:
            rows.extend(Batch(ids[b : b + 1], mask[b : b + 1]) for b in range(len(ids)))
    return rows


def split(data: list[Batch], batch_size: int) -> dict[str, list[Batch]]:
    """Three sets of sequences, 6 : 2 : 2, to fit, calibrate and evaluate."""
    rows = rows_of(data)
    if len(rows) < MIN_SEQUENCES:
        fix = "Pass more text or a smaller seq_len."
        sequences = Field(len(rows), "sequences to fit and to measure on", fix, CalibrationError)
        sequences.wrong(f"at least {MIN_SEQUENCES} (6 to fit, 2 to calibrate, 2 to evaluate)")
    names = ("fit",) * 6 + ("calibrate",) * 2 + ("evaluate",) * 2
    parts: dict[str, list[Batch]] = {"fit": [], "calibrate": [], "evaluate": []}
    for i, row in enumerate(rows):
        parts[names[i % 10]].append(row)
    return {name: _regroup(part, batch_size) for name, part in parts.items()}


def _regroup(rows: list[Batch], batch_size: int) -> list[Batch]:
    """Join rows of equal length to batches."""
    out = [row for row in rows if row.input_ids is None or row.kwargs]
    by_length: dict[int, list[Batch]] = {}
    for row in rows:
        if row.input_ids is not None and not row.kwargs:
            by_length.setdefault(row.input_ids.shape[1], []).append(row)
    for group in by_length.values():
        for i in range(0, len(group), batch_size):
            part = group[i : i + batch_size]
            ids = torch.cat([b.input_ids for b in part if b.input_ids is not None])
            out.append(Batch(ids, torch.cat([b.mask_BT for b in part if b.mask_BT is not None])))
    return out


def evenly(data: list[Batch], n_tokens: int) -> list[Batch]:
    """About ``n_tokens`` tokens in batches at equal distances in ``data``: neighbours are often of one text."""
    return data[:: max(1, round(sum(batch.n_tokens for batch in data) / n_tokens))]


def at_most(data: list[Batch], n_tokens: int) -> list[Batch]:
    """The first batches with at most ``n_tokens`` in all, but at least one."""
    totals = accumulate(batch.n_tokens for batch in data)
    return [batch for i, (batch, total) in enumerate(zip(data, totals)) if not i or total <= n_tokens]
