"""High-order features of attention, weights and routers: pure functions on the tensors' own device.

Every one returns a 1-d tensor of its numbers, in float64 where the device has it. None draws a random number, keeps a
graph, or waits for a device. Formulas, dtypes and edge cases are listed in ``docs/statistics.md``.

Shape suffixes: B samples, H heads of the query, G of the key, S queries, T keys, D their depth; R rows, C columns,
K vectors of a basis; E experts.
"""
# ruff: noqa: N803, N806 - the suffixes

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from msmon.backends.base import UnsupportedTensorError
from msmon.backends.pytorch.devices import accumulation_dtype
from msmon.backends.pytorch.kernels.layouts import whole_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

ATTENTION = ("entropy", "softmax_max")
LINEAR = ("sr", "kernel_norm")
ROUTER_WEIGHT = ("router_weight_similarity",)
ROUTER_LOGIT = ("per_token_expert_entropy",)

SCORES_LIMIT = 1 << 22
"""Attention scores that exist at once, unless one query of one sample already has more of them."""

FIRST_STEPS = 32
"""Lanczos steps of a weight never seen before: the edge of a random matrix's spectrum is crowded."""

NEXT_STEPS = 8
"""Lanczos steps of a weight whose singular vector is known from a step before."""

_SQUARINGS = 16
"""Squarings that find the largest eigenvalue of a small matrix: as good as 2^16 steps of power iteration."""

Order = Literal["s,b,h,d", "b,s,h,d"]


@dataclass(frozen=True)
class Visibility:
    """Which keys a query attends to.

    Attributes:
        causal: Query ``i`` sees keys ``0 … i`` only.
        masks: Each boolean or added to the scores, and broadcastable to ``[batch, heads, queries, keys]`` (or, as
            ``torch.nn.MultiheadAttention`` takes them, ``[batch · heads, queries, keys]``).
        true_hides: Whether True of a boolean mask hides a key (Megatron, ``torch.nn.MultiheadAttention``) or shows it
            (``scaled_dot_product_attention``).
    """

    causal: bool = False
    masks: tuple[Tensor, ...] = ()
    true_hides: bool = False


@torch.no_grad()
def attention(
    query: Tensor,
    key: Tensor,
    order: Order,
    visibility: Visibility,
    scale: float | None = None,
    *,
    samples: int | None = None,
    heads: int | None = None,
    scores_limit: int = SCORES_LIMIT,
) -> Tensor:
    r"""Entropy and largest weight of an attention, each the mean over samples, heads and queries.

    With :math:`p_i = \mathrm{softmax}(q_i K^T / \sqrt d)`: :math:`-\sum_j p_{ij} \log p_{ij}` and :math:`\max_j p_{ij}`.
    Scores are float32 (float64 of float64). A query that may see no key counts for nothing; without any that does, both
    are NaN. Scores are made in blocks: at most :data:`SCORES_LIMIT` of them, or those of one query of one sample, exist
    at once, a few times over.

    Args:
        query: In ``order``.
        key: In ``order``; may have fewer heads, each of which serves as many consecutive heads of the query.
        order: What the dimensions are.
        visibility: Which keys a query attends to.
        scale: Factor of the scores; by default :math:`1 / \sqrt d`.
        samples: Look at the first samples only.
        heads: Look at the first heads of the query only.
        scores_limit: See above.

    Returns:
        The two numbers.

    Raises:
        UnsupportedTensorError: The shapes do not make an attention.
    """
    query, key = whole_values(query), whole_values(key)
    _check_attention(query, key)
    places = (1, 2, 0, 3) if order == "s,b,h,d" else (0, 2, 1, 3)
    q_BHSD, k_BGTD = query.permute(places), key.permute(places)
    if q_BHSD.shape[0] != k_BGTD.shape[0] or q_BHSD.shape[1] % max(k_BGTD.shape[1], 1):
        raise UnsupportedTensorError(f"query {list(query.shape)} and key {list(key.shape)} do not belong together")
    masks = [_expanded(whole_values(mask), q_BHSD, k_BGTD) for mask in visibility.masks]
    group = q_BHSD.shape[1] // max(k_BGTD.shape[1], 1)
    if heads is not None:  # whole groups: a key's head serves all of its own
        kept = min(k_BGTD.shape[1], -(-heads // max(group, 1)))
        q_BHSD, k_BGTD = q_BHSD[:, : kept * group], k_BGTD[:, :kept]
    q_BHSD, k_BGTD = q_BHSD[:samples], k_BGTD[:samples]
    wanted = min(heads if heads is not None else q_BHSD.shape[1], q_BHSD.shape[1])
    wide = accumulation_dtype(query.device)
    sums = torch.zeros(3, dtype=wide, device=query.device)
    with torch.autocast(query.device.type, enabled=False):
        for part, rows, seen in _blocks(q_BHSD, k_BGTD, scores_limit, causal=visibility.causal):
            scores = _scores(q_BHSD[part, :, rows], k_BGTD[part, :, seen], scale)
            for mask in masks:
                scores = _masked(scores, mask[part, : scores.shape[1], rows, seen], visibility)
            if visibility.causal:
                places_S = torch.arange(rows.start, rows.stop, device=query.device)
                later_ST = torch.arange(seen.stop, device=query.device) > places_S[:, None]
                scores = scores.masked_fill(later_ST, -math.inf)
            sums += _entropy_and_maximum(scores[:, :wanted], wide)
    return sums[:2] / sums[2]


def _check_attention(query: Tensor, key: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dim() != 4 or not tensor.is_floating_point():  # noqa: PLR2004 - the four dimensions of ``order``
            raise UnsupportedTensorError(f"the {name} has shape {list(tensor.shape)}, not four dimensions of numbers")
    if query.shape[-1] != key.shape[-1]:
        raise UnsupportedTensorError(f"query {list(query.shape)} and key {list(key.shape)} do not belong together")


def _expanded(mask: Tensor, q_BHSD: Tensor, k_BGTD: Tensor) -> Tensor:
    shape = (*q_BHSD.shape[:3], k_BGTD.shape[2])
    if mask.dim() == 3 and mask.shape[0] == shape[0] * shape[1] and shape[0] > 1:  # noqa: PLR2004 - [batch · heads, queries, keys]
        mask = mask.reshape(shape[0], shape[1], *mask.shape[1:])
    try:
        return mask.expand(shape)
    except RuntimeError as error:
        raise UnsupportedTensorError(f"a mask of shape {list(mask.shape)} does not fit scores {list(shape)}") from error


def _blocks(q_BHSD: Tensor, k_BGTD: Tensor, limit: int, *, causal: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Samples, queries, and the keys that any of these queries may see."""
    samples, heads, queries, _ = q_BHSD.shape
    keys = k_BGTD.shape[2]
    a_row = max(heads * keys, 1)
    at_once = max(1, limit // (a_row * max(queries, 1)))
    rows = min(queries, max(1, limit // (a_row * at_once)))
    for first in range(0, samples, at_once):
        part = slice(first, min(first + at_once, samples))
        for start in range(0, queries, max(rows, 1)):
            stop = min(start + rows, queries)
            yield part, slice(start, stop), slice(0, min(stop, keys) if causal else keys)


def _scores(q_BHSD: Tensor, k_BGTD: Tensor, scale: float | None) -> Tensor:
    samples, heads, queries, depth = q_BHSD.shape
    kept_heads, keys = k_BGTD.shape[1], k_BGTD.shape[2]
    wide = torch.float64 if q_BHSD.dtype == torch.float64 else torch.float32
    grouped = q_BHSD.to(wide).reshape(samples, kept_heads, -1, depth)
    scores = torch.matmul(grouped * (depth**-0.5 if scale is None else scale), k_BGTD.to(wide).transpose(-1, -2))
    return scores.view(samples, heads, queries, keys)


def _masked(scores: Tensor, mask: Tensor, visibility: Visibility) -> Tensor:
    if mask.dtype == torch.bool:
        return scores.masked_fill(mask if visibility.true_hides else ~mask, -math.inf)
    return scores + mask.to(scores.dtype)


def _entropy_and_maximum(scores: Tensor, wide: torch.dtype) -> Tensor:
    """Summed over all queries that see a key, and how many those are."""
    blind = scores.amax(-1) == -math.inf
    logarithms = torch.log_softmax(scores, -1)
    weights = logarithms.exp()
    entropy = -(weights * logarithms.clamp_min(torch.finfo(scores.dtype).min)).sum(-1)  # 0 · log 0 is 0
    maximum = weights.amax(-1)
    return torch.stack(
        [
            entropy.masked_fill(blind, 0).sum(dtype=wide),
            maximum.masked_fill(blind, 0).sum(dtype=wide),
            blind.logical_not().sum(dtype=wide),
        ]
    )


class SpectralNorms:
    """Largest singular values by Golub-Kahan-Lanczos, going on from the vector of the step before.

    Source: G. H. Golub, W. Kahan, "Calculating the singular values and pseudo-inverse of a matrix", 1965; with full
    reorthogonalisation. The start vector of a weight is the same in every run.
    """

    def __init__(self) -> None:
        self._vectors: dict[str, Tensor] = {}

    @torch.no_grad()
    def linear(self, name: str, weight: Tensor) -> Tensor:
        r"""Stable rank :math:`\|W\|_F / \|W\|_2` and spectral norm :math:`\|W\|_2` of a matrix.

        NaN in the matrix makes both NaN; an infinity makes the norm inf and the rank NaN. A matrix of zeros has norm 0
        and no rank (NaN). Both are a little low, by less than one part in a hundred.

        Args:
            name: Whose weight it is: its vector is kept under this name.
            weight: ``[rows, columns]``, not empty.
        """
        wide = accumulation_dtype(weight.device)
        matrix = weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
        if matrix.shape[0] < matrix.shape[1]:
            matrix = matrix.t()
        frobenius = torch.linalg.vector_norm(matrix, dtype=wide)
        with torch.autocast(weight.device.type, enabled=False):
            spectral = self._spectral(name, matrix, wide)
        spectral = torch.where(frobenius.isfinite(), spectral, frobenius)
        return torch.stack([frobenius / spectral, spectral])

    def forget(self) -> None:
        """Begin anew."""
        self._vectors.clear()

    def _spectral(self, name: str, matrix_RC: Tensor, wide: torch.dtype) -> Tensor:
        known = self._vectors.get(name)
        fresh_C = _start_vector(matrix_RC)
        fits = known is not None and known.shape == fresh_C.shape and known.device == fresh_C.device
        start_C = known.to(fresh_C.dtype) if known is not None and fits else fresh_C
        steps = min(NEXT_STEPS if fits else FIRST_STEPS, matrix_RC.shape[1])
        basis, images = [start_C / _length(start_C)], []
        for step in range(steps):
            image_R = torch.mv(matrix_RC, basis[-1])
            images.append(image_R)
            if step + 1 < steps:
                basis.append(_next_vector(basis, torch.mv(matrix_RC.t(), image_R / _length(image_R))))
        images_RK = torch.stack(images, 1).to(wide)
        largest, mix_K = _largest_eigenvalue(images_RK.t() @ images_RK)
        vector_C = torch.mv(torch.stack(basis, 1), mix_K.to(fresh_C.dtype))
        sound = torch.isfinite(vector_C).all() & (vector_C != 0).any()
        self._vectors[name] = torch.where(sound, vector_C, fresh_C)
        return largest.sqrt()


def _start_vector(matrix_RC: Tensor) -> Tensor:
    """As good as random, and the same each time."""
    places = torch.arange(1, matrix_RC.shape[1] + 1, device=matrix_RC.device, dtype=torch.float32)
    return (places * places).sin().to(matrix_RC.dtype)


def _length(vector: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(vector, dtype=accumulation_dtype(vector.device))
    return length.to(vector.dtype).clamp_min(torch.finfo(vector.dtype).tiny)


def _next_vector(basis: list[Tensor], vector_C: Tensor) -> Tensor:
    """The part of a vector that is orthogonal to a basis, of length one; nothing when only rounding is left of it."""
    basis_CK = torch.stack(basis, 1)
    before = _length(vector_C)
    for _ in range(2):
        vector_C = vector_C - torch.mv(basis_CK, torch.mv(basis_CK.t(), vector_C))
    after = _length(vector_C)
    return torch.where(after > 1e-5 * before, vector_C / after, torch.zeros_like(vector_C))


def _largest_eigenvalue(gram_KK: Tensor) -> tuple[Tensor, Tensor]:
    """Of a small positive matrix, with its eigenvector, by products alone: solvers wait for the device."""
    tiny = torch.finfo(gram_KK.dtype).tiny
    power_KK = gram_KK / gram_KK.trace().clamp_min(tiny)
    for _ in range(_SQUARINGS):
        power_KK = power_KK @ power_KK
        power_KK = power_KK / power_KK.trace().clamp_min(tiny)
    strongest = power_KK.diagonal().argmax().reshape(1)
    eigenvector_K = power_KK.index_select(1, strongest).reshape(-1)
    value = (power_KK * gram_KK).sum() / power_KK.trace().clamp_min(tiny)
    return value, eigenvector_K


@torch.no_grad()
def router_weight_similarity(weight_ED: Tensor) -> Tensor:
    r"""Mean cosine between the weight vectors of two different experts.

    :math:`\frac{\|\sum_e u_e\|^2 - \sum_e \|u_e\|^2}{n(n-1)}` with :math:`u_e = w_e / \|w_e\|`: the mean over all pairs,
    without forming them. A vector of zeros is at a right angle to all others; fewer than two experts have no pair (NaN).
    """
    wide = accumulation_dtype(weight_ED.device)
    rows_ED = weight_ED.detach().to(wide)
    lengths_E1 = torch.linalg.vector_norm(rows_ED, dim=1, keepdim=True)
    units_ED = rows_ED / torch.where(lengths_E1 == 0, 1, lengths_E1)
    experts = weight_ED.shape[0]
    pairs = experts * (experts - 1)
    total = units_ED.sum(0).square().sum() - units_ED.square().sum()
    return (total / pairs if pairs else torch.full_like(total, math.nan)).reshape(1)


@torch.no_grad()
def router_logit_entropy(logits: Tensor) -> Tensor:
    r"""Entropy of the gate's softmax over experts, :math:`-\sum_e p_e \log p_e`, the mean over all tokens.

    Args:
        logits: ``[…, experts]``; softmax in float32 (float64 of float64). A token whose logits are all −inf counts for
            nothing.
    """
    wide = accumulation_dtype(logits.device)
    scores = logits.detach().to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    sums = _entropy_and_maximum(scores, wide)
    return sums[:1] / sums[2:]
