"""GPTQ chooses the integers and scales of a matrix so that its *outputs* change least on calibration inputs.

Columns are rounded one after the other. The columns not yet rounded compensate the error of each, as far as their
inputs are correlated (Frantar and others, arXiv 2210.17323). Then scales are fitted to their integers, and each integer
is chosen again with all others fixed. The format is that of rounding to nearest.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from torch_pi2.errors import NonFiniteError
from torch_pi2.formats import GROUP
from torch_pi2.ops.quantize import integers, pack

#: Share of the mean square of all inputs that is added to that of each, for inputs that calibration text lacks.
DAMPING = 0.01
#: Number of refinements of scales and integers.
SWEEPS = 1
#: int4: candidates for the integer of a group's value of largest magnitude, around both ends of -8 to 7.
_ENDS_INT4 = tuple(end / share for end in (-8.0, 7.0) for share in (1.1, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7))
_ENDS = {"int4": _ENDS_INT4, "int8": (127.0,)}
#: Columns whose errors are passed on to later blocks at once; rows solved at a time.
_BLOCK, _ROWS = 4 * GROUP, 1024


class Moments:
    """Sums over the inputs ``x`` of a matrix, ``tokens`` in number. ``squares_KK``: float32, of ``x x^T``.
    ``drift_KK``: of ``(y - x) x^T``, where y is the input of the float model at the same token; zero if no y was given.
    """

    def __init__(self, columns: int) -> None:
        self.tokens = 0
        self.squares_KK = torch.zeros((columns, columns))
        self.drift_KK = torch.zeros_like(self.squares_KK)

    def add(self, x_TK: torch.Tensor, float_TK: torch.Tensor | None = None) -> None:
        """Add inputs, and those of the float model."""
        x_TK = x_TK.float()
        self.tokens += len(x_TK)
        self.squares_KK += x_TK.T @ x_TK
        if float_TK is not None:
            self.drift_KK += (float_TK.float() - x_TK).T @ x_TK


class Solved(NamedTuple):
    """Quantised rows uint8 ``[N, row_bytes(K)]``, by column ``[K, row_bytes(N)]``, and their values in float32."""

    rows: torch.Tensor
    values_NK: torch.Tensor


class Grid:
    """What a format can store: integers times a scale by ``size`` columns (0: all); this is int4 and int8 of stores."""

    size = GROUP

    def __init__(self, weights: str) -> None:
        self.weights = weights

    def start(self, w_NK: torch.Tensor) -> Any:
        """The ``common`` argument of the other methods: what the scales of these rows share."""

    def scales(self, w_Nk: torch.Tensor, counts_k: torch.Tensor, common: Any, group: int) -> torch.Tensor:
        """``[N, 1]`` scales of a group; ``counts_k``: weight of each column's error."""
        return best_scales(w_Nk, self.weights, counts_k)

    def nearest(self, scale_N: torch.Tensor, common: Any, group: int) -> torch.Tensor:
        """The storable scales nearest to these."""
        return scale_N.half().float()

    def integers(self, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The nearest integers, as float32."""
        return integers(w, scale, self.weights)


class Solver:
    """Quantises matrices whose inputs have the given ``moments``, which are factored once for all matrices.

    It minimises the sum of ``(w y - w' x)^2`` over tokens and outputs, where x comes from the quantised layers before
    this one and y from the float model, so errors of earlier layers are compensated as well (Li and others, arXiv
    2504.02692). The same inputs and number of threads give the same bytes. Memory is at most about 23 K^2 bytes with
    moments: 4.7 GB for the down matrices of a 7B model.

    Args:
        what: name of the layer, for messages. weights: ``int4`` or ``int8``, or a grid.
        by_column: groups of 32 run along N within a column, as in neurons' down rows; else along K within a row.
        damping: see :data:`DAMPING`; raise it if there are few tokens for the number of columns.

    Raises:
        NonFiniteError: inputs with NaN or infinity.
    """

    def __init__(
        self,
        what: str,
        moments: Moments,
        weights: str | Grid,
        *,
        by_column: bool = False,
        sweeps: int = SWEEPS,
        damping: float = DAMPING,
    ) -> None:
        self._what, self._by_column, self._sweeps = what, by_column, sweeps
        self._grid = Grid(weights) if isinstance(weights, str) else weights
        self._size = self._grid.size or len(moments.squares_KK)
        more = 0 if by_column else -len(moments.squares_KK) % self._size
        h_KK = F.pad(moments.squares_KK, (0, more, 0, more)).div_(max(1, moments.tokens))
        self._check(h_KK, "inputs")
        mean = float(h_KK.diagonal().mean())
        h_KK.diagonal().add_(damping * mean if mean > 0 else 1.0)
        self._order = self._largest_first(h_KK.diagonal())
        self._h_KK = h_KK = h_KK[self._order[:, None], self._order]
        # One float64 matrix throughout, column-major for LAPACK; it is symmetric.
        work_KK = h_KK.double().mT
        torch.linalg.cholesky(work_KK, out=work_KK)
        torch.cholesky_inverse(work_KK, out=work_KK)
        inverse_KK = work_KK.to(torch.float32, memory_format=torch.contiguous_format)
        torch.linalg.cholesky(work_KK, upper=True, out=work_KK)
        self._factor_KK = work_KK.to(torch.float32, memory_format=torch.contiguous_format)
        del work_KK
        # Shrunk, since it is mostly noise if there are few tokens for the number of columns.
        drift_KK = F.pad(moments.drift_KK, (0, more, 0, more))[self._order[:, None], self._order]
        drift_KK.div_(moments.tokens + len(moments.drift_KK))
        for rows_k in drift_KK.split(_ROWS):
            rows_k.copy_(rows_k @ inverse_KK)
        self._drift_KK = drift_KK

    def _check(self, found: torch.Tensor, part: str) -> None:
        if not bool(found.isfinite().all()):
            fix = "Check the checkpoint and the dtype (float16 overflows at 65504: try bfloat16)."
            raise NonFiniteError(f"{part} of {self._what}", expected="finite numbers", found="NaN or infinity", fix=fix)

    def _largest_first(self, squares_K: torch.Tensor) -> torch.Tensor:
        """Columns by the size of their inputs, descending; groups along K stay together."""
        if self._by_column or not self._grid.size:
            return torch.argsort(squares_K, descending=True, stable=True)
        first_G = torch.argsort(squares_K.unflatten(0, (-1, self._size)).sum(1), descending=True, stable=True)
        return (first_G[:, None] * self._size + torch.arange(self._size)).flatten()

    def solve(self, w_NK: torch.Tensor) -> Solved:
        """Quantise ``w_NK`` of any float dtype to ``int4`` or ``int8``. Raises NonFiniteError: a scale overflows."""
        n, k = w_NK.shape
        values_NK, scale_NK = self.solve_values(w_NK)
        by_group = (values_NK.T, scale_NK.T) if self._by_column else (values_NK, scale_NK)
        values_MGk, scale_MGk = (tensor.unflatten(1, (-1, GROUP)) for tensor in by_group)
        scale_MG1 = scale_MGk[..., :1].clone(memory_format=torch.contiguous_format)
        return Solved(pack(values_MGk, scale_MG1, self._grid.weights), values_NK[:n, :k])

    def solve_values(self, w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantised values of ``w_NK`` and the scale of each, padded with zeros to whole groups."""
        n, k = w_NK.shape
        w_NK = F.pad(w_NK.detach().float(), (0, len(self._order) - k, 0, -n % GROUP if self._by_column else 0))
        values_NK, scale_NK = torch.empty_like(w_NK), torch.empty_like(w_NK)
        for start in range(0, len(w_NK), _ROWS):
            some = slice(start, start + _ROWS)
            values_NK[some], scale_NK[some] = self._solve(w_NK[some])
        self._check(values_NK, "values")
        return values_NK, scale_NK

    def _solve(self, w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantised values and scales, both ``[N, K]``. Inside, columns are in the order of solution."""
        w_NK = w_NK[:, self._order]
        w_NK = w_NK + w_NK @ self._drift_KK
        back = torch.argsort(self._order)
        common = self._grid.start(w_NK[:, back])
        q_NK, scale_NK = self._round(w_NK.clone(), common)
        for _ in range(self._sweeps):
            self._fit_scales(w_NK, q_NK, scale_NK, common)
            self._refit_integers(w_NK, q_NK, scale_NK)
        return (q_NK * scale_NK)[:, back], scale_NK[:, back]

    def _group(self, k: int) -> int:
        """Group of the ``k``-th column in the order of solution."""
        return int(self._order[k]) // self._size

    def _round(self, w_NK: torch.Tensor, common: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Integers and scales; passes the error of each column on to the later ones of ``w_NK``."""
        factor_KK, count = self._factor_KK, w_NK.shape[1]
        q_NK, scale_NK = torch.empty_like(w_NK), torch.empty_like(w_NK)
        for first in range(0, count, _BLOCK):
            last = min(first + _BLOCK, count)
            lost_NB = torch.empty((len(w_NK), last - first))
            for k in range(first, last):
                if self._by_column:
                    alike_k = torch.ones(GROUP)
                    scale_G1 = self._grid.scales(w_NK[:, k].unflatten(0, (-1, GROUP)), alike_k, common, 0)
                    scale_NK[:, k] = scale_G1.expand(-1, GROUP).flatten()
                elif k % self._size == 0:
                    group = slice(k, k + self._size)
                    counts_k = factor_KK.diagonal()[group].square().reciprocal()
                    scale_NK[:, group] = self._grid.scales(w_NK[:, group], counts_k, common, self._group(k))
                q_NK[:, k] = self._grid.integers(w_NK[:, k], scale_NK[:, k])
                lost_N = (w_NK[:, k] - q_NK[:, k] * scale_NK[:, k]) / factor_KK[k, k]
                w_NK[:, k + 1 : last] -= lost_N[:, None] * factor_KK[k, k + 1 : last]
                lost_NB[:, k - first] = lost_N
            w_NK[:, last:] -= lost_NB @ factor_KK[first:last, last:]
        return q_NK, scale_NK

    def _fit_scales(self, w_NK: torch.Tensor, q_NK: torch.Tensor, scale_NK: torch.Tensor, common: Any) -> None:
        """Refit the scale of each group to its integers, one group after the other."""
        slope_NK = (q_NK * scale_NK - w_NK) @ self._h_KK
        step = 1 if self._by_column else self._size
        for k in range(0, w_NK.shape[1], step):
            part = slice(k, k + step)
            q_Nk = q_NK[:, part]
            falls_N, bends_N = (slope_NK[:, part] * q_Nk).sum(1), ((q_Nk @ self._h_KK[part, part]) * q_Nk).sum(1)
            if self._by_column:  # a group is 32 rows of the column
                each = (v.unflatten(0, (-1, GROUP)).sum(1, keepdim=True).expand(-1, GROUP) for v in (falls_N, bends_N))
                falls_N, bends_N = (v.flatten() for v in each)
            best_N = scale_NK[:, k] - torch.where(bends_N > 0, falls_N / bends_N, 0.0)
            better_N = self._grid.nearest(best_N, common, self._group(k))
            slope_NK += ((better_N - scale_NK[:, k])[:, None] * q_Nk) @ self._h_KK[part]
            scale_NK[:, part] = better_N[:, None]

    def _refit_integers(self, w_NK: torch.Tensor, q_NK: torch.Tensor, scale_NK: torch.Tensor) -> None:
        """Choose the best integer of each column with all others fixed."""
        h_KK = self._h_KK
        slope_NK = (q_NK * scale_NK - w_NK) @ h_KK
        for first in range(0, w_NK.shape[1], _BLOCK):
            block = slice(first, first + _BLOCK)
            slope_NB, before_NB = slope_NK[:, block].clone(), q_NK[:, block] * scale_NK[:, block]
            for i in range(before_NB.shape[1]):
                k = first + i
                q_NK[:, k] = self._grid.integers(before_NB[:, i] - slope_NB[:, i] / h_KK[k, k], scale_NK[:, k])
                slope_NB += (q_NK[:, k] * scale_NK[:, k] - before_NB[:, i])[:, None] * h_KK[k, block]
            slope_NK += (q_NK[:, block] * scale_NK[:, block] - before_NB) @ h_KK[block]


def best_scales(w_Nk: torch.Tensor, weights: str, counts_k: torch.Tensor | None = None) -> torch.Tensor:
    """``[N, 1]``: by group of 32, the float16 candidate with the least squared error, ``counts_k`` weighing columns."""
    ends_E = torch.tensor(_ENDS[weights])
    extreme_N1 = w_Nk.gather(1, w_Nk.abs().argmax(1, keepdim=True)) + 0.0  # -0.0 becomes 0.0
    extreme_N1 = extreme_N1.abs() if weights == "int8" else extreme_N1
    scale_NE = (extreme_N1 / ends_E).half().float()
    off_NEk = w_Nk[:, None] - scale_NE[..., None] * integers(w_Nk[:, None], scale_NE[..., None], weights)
    error_NE = off_NEk.square_() @ (torch.ones(GROUP) if counts_k is None else counts_k)
    return scale_NE.gather(1, error_NE.argmin(1, keepdim=True))
