"""High-order features against float64 NumPy, over dtypes, layouts and masks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from msmon.backends.base import UnsupportedTensorError
from msmon.backends.pytorch import features
from msmon.backends.pytorch.attention import attention_inputs
from msmon.backends.pytorch.features import SpectralNorms, Visibility
from msmon.backends.pytorch.histogram import Histogram
from msmon.backends.pytorch.taps.updates import adam_update, direction

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EXACT = {torch.float64: 1e-12}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def expected(query: torch.Tensor, key: torch.Tensor, order: str, hidden: Any = False, added: Any = 0.0) -> list[float]:
    """Entropy and largest weight of ``[b, h, s, t]`` scores, plainly; a query that sees nothing is left out."""
    places = (1, 2, 0, 3) if order == "s,b,h,d" else (0, 2, 1, 3)
    q, k = (tensor.double().numpy().transpose(places) for tensor in (query, key))
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = np.einsum("bhsd,bhtd->bhst", q, k) / math.sqrt(q.shape[-1]) + np.asarray(added)
    scores = np.where(np.asarray(hidden), -np.inf, scores)
    entropies, maxima = [], []
    for row in scores.reshape(-1, scores.shape[-1]):
        seen = row[row > -np.inf]
        if seen.size or np.isnan(row).any():
            weights = np.exp(seen - seen.max())
            weights /= weights.sum()
            entropies.append(-sum(p * math.log(p) for p in weights if p > 0))
            maxima.append(weights.max())
    return [float(np.mean(entropies)), float(np.mean(maxima))]


def later(queries: int, keys: int) -> Any:
    return np.arange(keys)[None, :] > np.arange(queries)[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["s,b,h,d", "b,s,h,d"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scores_limit", [1, 100, 1 << 22])
def test_attention(dtype: torch.dtype, order: Any, causal: bool, scores_limit: int) -> None:
    """All heads and samples count, in one block or in blocks of a query."""
    query, key = normal(7, 5, 4, 8, seed=1, dtype=dtype) * 3, normal(7, 5, 4, 8, seed=2, dtype=dtype)
    found = features.attention(query, key, order, Visibility(causal=causal), scores_limit=scores_limit)
    size = 7 if order == "s,b,h,d" else 5
    truth = expected(query, key, order, hidden=later(size, size) if causal else False)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(truth, rel=EXACT.get(dtype, 1e-5))


@pytest.mark.parametrize("scores_limit", [1, 60, 1 << 22])
def test_attention_of_grouped_queries(scores_limit: int) -> None:
    """Each head of the key serves the next heads of the query, as many as there are to one; keys may be longer."""
    query, key = normal(2, 5, 6, 4, seed=1), normal(2, 9, 3, 4, seed=2)
    found = features.attention(query, key, "b,s,h,d", Visibility(), scores_limit=scores_limit)
    assert found.tolist() == pytest.approx(expected(query, key, "b,s,h,d"), rel=1e-5)
    fewer = features.attention(query, key, "b,s,h,d", Visibility(), samples=1, heads=3, scores_limit=scores_limit)
    first = expected(query[:1, :, :3], torch.stack([key[:1, :, 0], key[:1, :, 0], key[:1, :, 1]], 2), "b,s,h,d")
    assert fewer.tolist() == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize("shape", [(6, 6), (3, 1, 6, 6), (1, 1, 6, 6), (3, 2, 6, 6), (3, 1, 1, 6), (6,), (2, 1, 6)])
@pytest.mark.parametrize("scores_limit", [1, 30, 1 << 22])
def test_masks(shape: tuple[int, ...], scores_limit: int) -> None:
    """Boolean masks of both conventions and added ones, of any shape that broadcasts."""
    query, key = normal(3, 6, 2, 4, seed=1), normal(3, 6, 2, 4, seed=2)
    hides = normal(*shape, seed=3) > 0.5

    def found(**described: Any) -> list[float]:
        visibility = Visibility(**described)
        return features.attention(query, key, "b,s,h,d", visibility, scores_limit=scores_limit).tolist()

    truth = pytest.approx(expected(query, key, "b,s,h,d", hidden=hides.numpy()), rel=1e-5)
    assert found(masks=(hides,), true_hides=True) == truth
    assert found(masks=(~hides,)) == truth
    assert found(masks=(torch.zeros(shape).masked_fill(hides, -math.inf),)) == truth
    both = expected(query, key, "b,s,h,d", hidden=hides.numpy() | later(6, 6))
    assert found(masks=(hides,), true_hides=True, causal=True) == pytest.approx(both, rel=1e-5)
    added = normal(*shape, seed=4)
    assert found(masks=(added,)) == pytest.approx(expected(query, key, "b,s,h,d", added=added.numpy()), rel=1e-5)


def test_mask_by_head_and_sample() -> None:
    """``[batch · heads, queries, keys]``, as MultiheadAttention takes it."""
    query, key = normal(3, 6, 2, 4, seed=1), normal(3, 6, 2, 4, seed=2)
    hides = normal(6, 6, 6, seed=3) > 0.5
    found = features.attention(query, key, "b,s,h,d", Visibility(masks=(hides,), true_hides=True))
    assert found.tolist() == pytest.approx(
        expected(query, key, "b,s,h,d", hidden=hides.view(3, 2, 6, 6).numpy()), rel=1e-5
    )


def test_queries_that_see_nothing() -> None:
    """They count for nothing; when none sees anything, there is no value."""
    query, key = normal(1, 4, 1, 4), normal(1, 4, 1, 4, seed=1)
    hides = torch.zeros(4, 4, dtype=torch.bool)
    hides[1] = True
    found = features.attention(query, key, "b,s,h,d", Visibility(masks=(hides,), true_hides=True))
    assert found.tolist() == pytest.approx(expected(query, key, "b,s,h,d", hidden=hides.numpy()), rel=1e-5)
    nothing = features.attention(
        query, key, "b,s,h,d", Visibility(masks=(~torch.zeros(4, 4, dtype=torch.bool),), true_hides=True)
    )
    assert all(map(math.isnan, nothing))
    assert all(map(math.isnan, features.attention(query[:, :0], key, "b,s,h,d", Visibility())))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_attention_of_what_is_no_number(value: float) -> None:
    """NaN and infinities do not go by unseen."""
    query, key = normal(2, 4, 2, 4), normal(2, 4, 2, 4, seed=1)
    query[1, 2, 1, 3] = value
    key[1, 0, 1, 3], key[1, 1, 1, 3] = 1.0, -1.0
    assert all(map(math.isnan, features.attention(query, key, "b,s,h,d", Visibility())))


def test_large_scores() -> None:
    """Half precision does not overflow: scores are float32, and softmax is taken of their logarithms."""
    query = torch.full((1, 3, 1, 64), 300.0, dtype=torch.float16)
    key = torch.stack([torch.full((1, 1, 64), factor) for factor in (300.0, 299.0, -300.0)], 1).half()
    assert features.attention(query, key, "b,s,h,d", Visibility()).tolist() == pytest.approx([0, 1])


def test_autocast_and_scale() -> None:
    """Autocast around it changes nothing; a factor of the module's own is used."""
    query, key = normal(1, 4, 2, 16), normal(1, 4, 2, 16, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = features.attention(query, key, "b,s,h,d", Visibility(), 0.5)
    assert found.tolist() == pytest.approx(expected(query * 2, key, "b,s,h,d"), rel=1e-5)


def test_memory_of_attention() -> None:
    """No block holds more scores than allowed."""
    query, key = normal(1, 512, 4, 8), normal(1, 512, 4, 8, seed=1)
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result.numel())
            return result

    with Sizes():
        features.attention(query, key, "b,s,h,d", Visibility(causal=True), scores_limit=1 << 15)
    assert 1 << 14 < max(sizes) <= 1 << 15


@pytest.mark.parametrize(
    "shapes",
    [((3, 4, 8), (3, 4, 8)), ((2, 3, 4, 8), (2, 3, 4, 6)), ((2, 3, 4, 8), (1, 3, 4, 8)), ((2, 3, 4, 8), (2, 3, 3, 8))],
)
def test_no_attention(shapes: Any) -> None:
    """Shapes that make no attention are refused."""
    with pytest.raises(UnsupportedTensorError):
        features.attention(normal(*shapes[0]), normal(*shapes[1]), "b,s,h,d", Visibility())
    with pytest.raises(UnsupportedTensorError):
        mask = torch.zeros(5, 5, dtype=torch.bool)
        features.attention(normal(2, 3, 4, 8), normal(2, 3, 4, 8), "b,s,h,d", Visibility(masks=(mask,)))


# Where query, key and mask are found


class Core(torch.nn.Module):
    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any = None, is_causal: bool = False) -> Any:
        return query


class Unnamed(torch.nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args


def test_arguments() -> None:
    """By position, by name, out of order, and with no names at all."""
    q, k, v = normal(1, 2, 3, 4), normal(1, 2, 3, 4, seed=1), normal(1, 2, 3, 4, seed=2)
    for module, args, kwargs in (
        (Core(), (q, k, v), {}),
        (Core(), (q,), {"value": v, "key": k}),
        (Core(), (), {"value": v, "key": k, "query": q}),
        (Unnamed(), (q, k, v), {}),
        (Unnamed(), (v,), {"q": q, "k": k}),
    ):
        found = attention_inputs(module, args, kwargs, "s,b,h,d")
        assert found.query is q
        assert found.key is k
        assert found.visibility == Visibility()
    with pytest.raises(UnsupportedTensorError, match="not among its arguments"):
        attention_inputs(Unnamed(), (q,), {}, "s,b,h,d")


def test_visibility() -> None:
    """What makes an attention causal, and what True means in a mask."""
    q, mask = normal(1, 2, 3, 4), torch.zeros(2, 2, dtype=torch.bool)

    def seen(*args: Any, module: Any = None, **kwargs: Any) -> tuple[bool, bool, bool]:
        visibility = attention_inputs(module or Core(), (q, q, q, *args), kwargs, "s,b,h,d").visibility
        return visibility.causal, bool(visibility.masks), visibility.true_hides

    assert seen(is_causal=True) == (True, False, False)
    assert seen(None, True) == (True, False, False)
    assert seen(mask) == (False, True, False)
    assert seen(module=Unnamed(), causal=True) == (True, False, False)
    for name in ("is_causal", "causal"):
        attribute = Unnamed()
        setattr(attribute, name, True)
        assert seen(module=attribute) == (True, False, False)
        assert seen(module=attribute, attn_mask=mask) == (False, True, False)
        assert seen(module=attribute, is_causal=False) == (False, False, False)
    megatron = Unnamed()
    megatron.attn_mask_type = type("Type", (), {"name": "padding_causal"})()  # type: ignore[assignment]  # an enum's member
    assert seen(module=megatron, attention_mask=mask) == (True, True, True)
    assert seen(module=megatron, attention_mask=mask, attn_mask_type="padding") == (False, True, True)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("own_sizes", [False, True])
@pytest.mark.parametrize("masked", ["", "attn_mask", "key_padding_mask", "both"])
def test_multihead_attention(batch_first: bool, own_sizes: bool, masked: str) -> None:
    """Against the weights that the module itself returns."""
    torch.manual_seed(0)
    sizes = {"kdim": 6, "vdim": 6} if own_sizes else {}
    module = torch.nn.MultiheadAttention(8, 2, batch_first=batch_first, **sizes)  # type: ignore[arg-type]  # sizes only
    query, key = normal(3, 5, 8), normal(3, 5, 6 if own_sizes else 8, seed=1)
    batch, length = (3, 5) if batch_first else (5, 3)
    masks: dict[str, Any] = {}
    if masked in {"attn_mask", "both"}:
        masks["attn_mask"] = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    if masked in {"key_padding_mask", "both"}:
        masks["key_padding_mask"] = torch.arange(length)[None].expand(batch, -1) > 1
    _, weights = module(query, key, key, average_attn_weights=False, **masks)
    weights = weights.detach().double().numpy()
    truth = [
        float(-(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1).mean()),
        float(weights.max(-1).mean()),
    ]
    for place in ((query, key, key), (query,)):
        named = {} if len(place) > 1 else {"key": key, "value": key}
        found = features.attention(*attention_inputs(module, place, {**named, **masks}, "s,b,h,d"))
        assert found.tolist() == pytest.approx(truth, rel=1e-5)


def test_multihead_attention_of_one_sample() -> None:
    """Without a batch; and with keys of its own it is refused."""
    module = torch.nn.MultiheadAttention(8, 2)
    query = normal(5, 8)
    _, weights = module(query, query, query, average_attn_weights=False)
    found = features.attention(*attention_inputs(module, (query, query, query), {}, "b,s,h,d"))
    assert float(found[1]) == pytest.approx(float(weights.detach().amax(-1).mean()), rel=1e-5)
    with pytest.raises(UnsupportedTensorError):
        attention_inputs(torch.nn.MultiheadAttention(8, 2, add_bias_kv=True), (query, query, query), {}, "b,s,h,d")


# Weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(512, 512), (300, 40), (40, 300), (1, 7), (7, 1), (1, 1)])
def test_linear(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """To one part in a hundred of the singular values, at the first look and at later ones while the weight moves."""
    norms = SpectralNorms()
    for seed in range(3):
        weight = normal(*shape, seed=0, dtype=dtype) + 0.02 * normal(*shape, seed=seed, dtype=dtype)
        values = np.linalg.svd(weight.double().numpy(), compute_uv=False)
        rank, norm = norms.linear("w", weight).tolist()
        assert norm == pytest.approx(values[0], rel=1e-2)
        assert norm <= values[0] * (1 + 1e-5)
        assert rank == pytest.approx(math.sqrt((values**2).sum()) / values[0], rel=1e-2)


@pytest.mark.slow
def test_spectral_norm_of_many_gaussians() -> None:
    """512 × 512, at the first look: the gaps at the edge of such a spectrum are small."""
    worst = 0.0
    for seed in range(100):
        weight = normal(512, 512, seed=seed)
        truth = np.linalg.norm(weight.numpy(), 2)
        worst = max(worst, abs(float(SpectralNorms().linear("w", weight)[1]) / truth - 1))
    assert worst < 5e-3


@pytest.mark.parametrize("seed", range(5))
def test_weight_of_low_rank(seed: int) -> None:
    """A basis longer than the rank does no harm."""
    weight = normal(64, 2, seed=seed) @ normal(2, 48, seed=seed + 10)
    values = np.linalg.svd(weight.double().numpy(), compute_uv=False)
    norms = SpectralNorms()
    for _ in range(3):
        assert float(norms.linear("w", weight)[1]) == pytest.approx(values[0], rel=1e-5)
    assert SpectralNorms().linear("w", torch.eye(40)).tolist() == pytest.approx([math.sqrt(40), 1], rel=1e-5)


def test_layouts_of_a_weight() -> None:
    """Transposed and strided weights; and the same numbers in every run."""
    weight = normal(30, 20)
    first = SpectralNorms().linear("w", weight)
    assert SpectralNorms().linear("other", weight).tolist() == first.tolist()
    for same in (weight.t().contiguous().t(), torch.stack([weight, weight], 2)[:, :, 1]):
        assert not same.is_contiguous()
        assert SpectralNorms().linear("w", same).tolist() == pytest.approx(first.tolist(), rel=1e-5)
    assert SpectralNorms().linear("w", weight.t()).tolist() == pytest.approx(first.tolist(), rel=1e-5)


def test_weights_that_are_no_numbers() -> None:
    """NaN, infinities and zeros; afterwards a sound weight is right again, and so is one of another size."""
    norms = SpectralNorms()
    weight = normal(20, 20)
    broken = weight.clone()
    broken[3, 4] = math.nan
    assert all(map(math.isnan, norms.linear("w", broken)))
    broken[3, 4] = -math.inf
    rank, norm = norms.linear("w", broken).tolist()
    assert math.isnan(rank)
    assert norm == math.inf
    rank, norm = norms.linear("w", torch.zeros(20, 20)).tolist()
    assert math.isnan(rank)
    assert norm == 0
    for sound in (weight, normal(20, 9), normal(20, 20, dtype=torch.float64), 1e30 * weight, 1e-30 * weight):
        truth = np.linalg.norm(sound.double().numpy(), 2)
        assert float(norms.linear("w", sound)[1]) == pytest.approx(truth, rel=1e-2)


# Routers


@pytest.mark.parametrize("dtype", DTYPES)
def test_router_weight_similarity(dtype: torch.dtype) -> None:
    """The mean over all pairs of experts."""
    weight = normal(6, 16, dtype=dtype) + 0.5
    rows = weight.double().numpy()
    cosines = [
        float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        for i, a in enumerate(rows)
        for j, b in enumerate(rows)
        if i != j
    ]
    assert features.router_weight_similarity(weight).tolist() == pytest.approx([np.mean(cosines)], rel=1e-9)
    assert features.router_weight_similarity(weight.t().contiguous().t()).tolist() == pytest.approx([np.mean(cosines)])


def test_router_weights_at_the_edge() -> None:
    """Zeros are at a right angle to everything, one expert has no pair, NaN stays NaN."""
    assert features.router_weight_similarity(torch.tensor([[1.0, 0], [0, 0], [2, 0]])).tolist() == pytest.approx(
        [1 / 3]
    )
    assert math.isnan(features.router_weight_similarity(torch.ones(1, 3)))
    assert math.isnan(features.router_weight_similarity(torch.tensor([[1.0, math.nan], [1, 2]])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_router_logit_entropy(dtype: torch.dtype) -> None:
    """The mean over tokens of any number of dimensions."""
    logits = 3 * normal(4, 5, 8, dtype=dtype)
    scores = logits.double().numpy().reshape(-1, 8)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    truth = float(-(weights * np.log(weights)).sum(-1).mean())
    assert features.router_logit_entropy(logits).tolist() == pytest.approx([truth], rel=EXACT.get(dtype, 1e-5))
    masked = torch.cat([logits, torch.full((4, 1, 8), -math.inf, dtype=dtype)], 1)
    assert features.router_logit_entropy(masked).tolist() == pytest.approx([truth], rel=EXACT.get(dtype, 1e-5))
    logits[0, 0, 0] = math.nan
    assert math.isnan(features.router_logit_entropy(logits))


def test_nothing_is_left_behind() -> None:
    """No graph, and no random number drawn."""
    state = torch.get_rng_state()
    query = normal(1, 4, 2, 8).requires_grad_()
    weight = torch.nn.Parameter(normal(8, 8))
    results = [
        features.attention(query, query, "b,s,h,d", Visibility()),
        SpectralNorms().linear("w", weight),
        features.router_weight_similarity(weight),
        features.router_logit_entropy(query),
    ]
    assert not any(result.requires_grad for result in results)
    assert torch.equal(state, torch.get_rng_state())


def test_nothing_waits_for_a_device() -> None:
    """No operator whose result the host must know before it goes on."""
    calls: set[str] = set()

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.add(function._schema.name.removeprefix("aten::"))
            return function(*args, **(kwargs or {}))

    query, weight, mask = normal(2, 6, 2, 8), normal(20, 30), torch.ones(6, 6, dtype=torch.bool).tril()
    state = {"exp_avg": weight, "exp_avg_sq": weight.square(), "step": torch.tensor(3.0)}
    histogram = Histogram()
    histogram.counts(weight)  # makes the edges, once
    with Names():
        features.attention(query, query, "b,s,h,d", Visibility(causal=True, masks=(mask,)), scores_limit=50)
        norms = SpectralNorms()
        for _ in range(2):
            norms.linear("w", weight)
        features.router_weight_similarity(weight)
        features.router_logit_entropy(weight)
        direction(weight, weight)
        adam_update(state, {"betas": (0.9, 0.99), "eps": 1e-8})
        histogram.counts(weight)
    waiting = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "_linalg_svd", "_linalg_eigh"}
    assert not calls & waiting
    assert {"scatter_add_", "bucketize", "mv", "_log_softmax"} <= {name.split(".")[0] for name in calls}
