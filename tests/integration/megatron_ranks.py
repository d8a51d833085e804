"""Megatron-core over two gloo ranks; the truth comes from a twin without any of it that each rank trains by itself.

The twin has the same weights at every step. Rank by rank it computes the gradients of that rank's data; their mean,
clipped as Megatron clips, is what the ranks together must have.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import megatron_on_cpu
import torch
import torch.distributed as dist
from torch import nn
from truth import batch, fingerprint

MINOR = int(version("megatron-core").split(".")[1])
OLD = MINOR < 8
if OLD:
    megatron_on_cpu.install_apex()
megatron_on_cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.module import Float16Module, MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS, MICRO_BATCHES, CLIP = 3, 2, 0.1
WIDTH = 40  # a DistributedOptimizer cuts in the middle of a weight
ADAM = {"lr": 1e-2, "weight_decay": 0.0}


class Small(MegatronModule):  # type: ignore[misc]
    """Two layers that tensor parallelism splits, one by rows and one by columns, and some that it does not."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        split = {"config": config, "init_method": nn.init.zeros_, "bias": True}
        self.inner = tensor_parallel.ColumnParallelLinear(4, WIDTH, gather_output=False, **split)
        self.outer = tensor_parallel.RowParallelLinear(WIDTH, 4, input_is_parallel=True, skip_bias_add=False, **split)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 1)

    def set_input_tensor(self, tensor: Any) -> None:
        """Comes from the stage before, in a pipeline."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(x.to(self.head.weight.dtype))[0])
        return self.head(self.norm(self.outer(x)[0]))  # type: ignore[no-any-return]


class Plain(nn.Module):
    """The same without Megatron."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.norm, self.head = (
            nn.Linear(4, WIDTH),
            nn.Linear(WIDTH, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.outer(torch.tanh(self.inner(x)))))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        label: Class of the model.
        dtype: Of its parameters.
        tensor_ranks: Over how many ranks layers are split; the others have other data.
        distributed: With a ``DistributedOptimizer``.
        overlap: Communication begins while the last backward pass runs.
    """

    label: str
    dtype: torch.dtype = torch.float32
    tensor_ranks: int = 1
    distributed: bool = False
    overlap: bool = False

    @property
    def data_ranks(self) -> int:
        return SIZE // self.tensor_ranks


CASES = [
    Case("Float32"),
    Case("Bfloat16", torch.bfloat16),
    Case("Spread32", distributed=True),
    Case("Spread16", torch.bfloat16, distributed=True),
    Case("Overlap", torch.bfloat16, distributed=True, overlap=True),
    Case("OverlapWhole", overlap=True),
    Case("Tensor", tensor_ranks=2),
]


def trains_here(case: Case) -> bool:
    """0.6.0 cannot make its ``FP32Optimizer``, and then for some time there was no ``DistributedOptimizer`` without CUDA."""
    return case.dtype is torch.bfloat16 if OLD else MINOR >= 14 or not case.distributed


@dataclass
class Setup:
    """What a Megatron script has made before it trains."""

    config: Any
    chunks: list[Any]
    optimizer: Any
    run: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.run = get_forward_backward_func()


def configure(case: Case, **options: Any) -> Any:
    parallel_state.destroy_model_parallel()
    names = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
    parallel_state.initialize_model_parallel(case.tensor_ranks, *(options[name] for name in names if name in options))
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    fused = ("gradient_accumulation", "bias_activation", "bias_dropout", "masked_softmax")
    return TransformerConfig(
        **{"num_layers": 1, "hidden_size": 4, "num_attention_heads": 2, **options},
        **{f"{name}_fusion": False for name in fused},
        use_cpu_initialization=True,
        params_dtype=case.dtype,
        bf16=case.dtype is torch.bfloat16,
        fp16=case.dtype is torch.float16,
        tensor_model_parallel_size=case.tensor_ranks,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def wrap(case: Case, config: Any, models: Sequence[Any], **options: Any) -> Setup:
    how = {"overlap_grad_reduce": case.overlap, "use_distributed_optimizer": case.distributed}
    chunks = []
    for model in models:
        inner = model if case.dtype is torch.float32 else Float16Module(config, model)
        if OLD:
            group = parallel_state.get_data_parallel_group()
            old = {**how, "accumulate_allreduce_grads_in_fp32": True}
            chunks.append(DistributedDataParallel(config, inner, group, **old))
        else:
            from megatron.core.distributed import DistributedDataParallelConfig

            ddp = DistributedDataParallelConfig(**how, grad_reduce_in_fp32=True, bucket_size=40)
            chunks.append(DistributedDataParallel(config, ddp, inner))
    of_optimizer = OptimizerConfig(
        optimizer="adam",
        **ADAM,
        clip_grad=CLIP,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=case.dtype,
        use_distributed_optimizer=case.distributed,
        **options,
    )
    optimizer = get_megatron_optimizer(of_optimizer, chunks)
    config.finalize_model_grads_func = finalize_model_grads
    if case.overlap:
        config.no_sync_func = chunks[0].no_sync
    return Setup(config, chunks, optimizer)


def data(step: int, micro: int, data_rank: int) -> torch.Tensor:
    return batch(1000 * data_rank + 10 * step + micro)


def forward_backward(setup: Setup, step: int, data_rank: int, *, micro_batches: int = MICRO_BATCHES) -> torch.Tensor:
    """All micro-batches of a step, as Megatron's own training loop has them."""

    def forward_step(batches: Any, model: Any) -> Any:
        output = model(next(batches))
        return output, lambda out: (out.float().pow(2).mean(), {"loss": out.detach().float().pow(2).mean()})

    for chunk in setup.chunks:
        chunk.zero_grad_buffer()
    setup.optimizer.zero_grad()
    found = setup.run(
        forward_step_func=forward_step,
        data_iterator=iter([data(step, micro, data_rank) for micro in range(micro_batches)]),
        model=setup.chunks,
        num_microbatches=micro_batches,
        seq_length=1,
        micro_batch_size=8,
        forward_only=False,
    )
    return torch.stack([each["loss"] for each in found])


def own_gradients(twin: nn.Module, step: int, data_ranks: int) -> list[list[dict[str, torch.Tensor]]]:
    """Of each data rank, after each micro-batch: the gradients of its own data, summed so far in float32."""
    found: list[list[dict[str, torch.Tensor]]] = []
    for rank in range(data_ranks):
        sums = {name: torch.zeros(p.shape) for name, p in twin.named_parameters()}
        found.append([])
        for micro in range(MICRO_BATCHES):
            twin.zero_grad()
            (twin(data(step, micro, rank)).float().pow(2).mean() / MICRO_BATCHES).backward()
            for name, parameter in twin.named_parameters():
                sums[name] = sums[name] + parameter.grad.float()
            found[-1].append(dict(sums))
    return found


def clipped(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert norm > CLIP, "nothing is clipped: the case does not tell"
    return {name: gradient * (CLIP / (norm + 1e-6)) for name, gradient in gradients.items()}


def part_of(parameter: Any, tensor: torch.Tensor) -> torch.Tensor:
    """What tensor parallelism leaves of a whole on this rank."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return tensor
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return tensor.chunk(ranks, parameter.partition_dim)[rank]


def seeded(case: Case) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: tensor.to(case.dtype) for name, tensor in Plain().state_dict().items()}


def small(case: Case, config: Any, base: type = Small) -> Any:
    """A model with the weights of its case."""
    model = type(case.label, (base,), {})(config).to(case.dtype)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(part_of(parameter, seeded(case)[name]))
    return model


def observe(case: Case) -> dict[str, Any]:
    """Train with and without Megatron, and hold one against the other.

    Returns:
        ``true``: kind of row → (name, step) → the whole tensor. ``first``: gradients after the first micro-batch.
        ``bits``: of this rank's weights.
    """
    config = configure(case)
    model = small(case, config)
    twin = Plain().to(case.dtype) if case.tensor_ranks > 1 else Small(config).to(case.dtype)
    twin.load_state_dict(seeded(case), strict=False)
    of_twin = Plain()
    of_twin.load_state_dict(twin.state_dict(), strict=False)
    masters = dict(of_twin.named_parameters())
    adam = torch.optim.AdamW(masters.values(), foreach=False, **ADAM)
    setup = wrap(case, config, [model])
    true: dict[str, dict[tuple[str, int], torch.Tensor]] = {}

    def note(kind: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        true.setdefault(kind, {}).update({(name, step): tensor.detach().clone() for name, tensor in tensors.items()})

    data_rank = parallel_state.get_data_parallel_rank()
    for step in range(STEPS):
        own = own_gradients(twin, step, case.data_ranks)
        note("grad_unreduced", step, own[data_rank][-1])
        note("after_the_first", step, own[data_rank][0])
        reduced = clipped({name: sum(rank[-1][name] for rank in own) / case.data_ranks for name in masters})
        note("grad_reduced", step, reduced)
        note("param_origin", step, dict(twin.named_parameters()))
        for key in ("exp_avg", "exp_avg_sq") if step else ():
            note(key, step, {name: adam.state[master][key] for name, master in masters.items()})
        forward_backward(setup, step, data_rank)
        assert setup.optimizer.step()[0]
        for name, master in masters.items():
            master.grad = reduced[name]
        adam.step()
        for name, parameter in twin.named_parameters():
            parameter.data.copy_(masters[name])
        note("param_updated", step, dict(twin.named_parameters()))
        for name, parameter in model.named_parameters():
            tolerance = 1e-2 if case.dtype is torch.bfloat16 else 1e-5
            expected = nn.Parameter(part_of(parameter, twin.get_parameter(name)))
            torch.testing.assert_close(parameter, expected, rtol=tolerance, atol=tolerance)
    return {"first": true.pop("after_the_first"), "true": true, "bits": fingerprint(*model.parameters())}


def train_gpt(case: Case, **options: Any) -> dict[str, Any]:
    """Nothing but a training, of Megatron's own GPT.

    Args:
        case: How it is wrapped.
        options: Of its configuration: how many chunks of how many pipeline stages, with four micro-batches then.

    Returns:
        ``bits``: of this rank's losses and weights.
    """
    config = configure(case, hidden_size=16, **options)
    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    torch.manual_seed(3)
    parts = []
    for number in range(chunks):
        rank = parallel_state.get_pipeline_model_parallel_rank()
        place = {"pre_process": rank == number == 0, "post_process": (rank, number) == (stages - 1, chunks - 1)}
        made = type(case.label, (GPTModel,), {})(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=32,
            max_sequence_length=8,
            share_embeddings_and_output_weights=False,
            **place,
            **({"vp_stage": number} if chunks > 1 else {}),
        )
        made.model_type = ModelType.encoder_or_decoder
        parts.append(made)
    setup = wrap(case, config, parts)
    mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)[None, None]
    micro_batches, data_rank = 2 * stages, parallel_state.get_data_parallel_rank()

    def forward_step(batches: Any, model: Any) -> Any:
        tokens = next(batches)
        output = model(tokens, torch.arange(8)[None].expand_as(tokens), mask, labels=tokens.roll(-1, 1))
        return output, lambda out: (out.float().mean(), {"loss": out.detach().float().mean()})

    def batches(step: int) -> Any:
        seeds = [torch.Generator().manual_seed(1000 * data_rank + 10 * step + n) for n in range(micro_batches)]
        return iter([torch.randint(32, (2, 8), generator=seed) for seed in seeds])

    losses = []
    for step in range(STEPS):
        for chunk in setup.chunks:
            chunk.zero_grad_buffer()
        setup.optimizer.zero_grad()
        found = setup.run(
            forward_step_func=forward_step,
            data_iterator=[batches(step) for _ in range(chunks)] if chunks > 1 else batches(step),
            model=setup.chunks,
            num_microbatches=micro_batches,
            seq_length=8,
            micro_batch_size=2,
            forward_only=False,
        )
        losses += [each["loss"] for each in found]
        assert setup.optimizer.step()[0]
    return {"bits": fingerprint(*losses, *(parameter for part in parts for parameter in part.parameters()))}


def train_scaled() -> dict[str, Any]:
    """In float16, with a loss scale that is too large at first.

    Returns:
        ``steps``: whether each was taken, and its scale.
    """
    case = Case("Scaled", torch.float16, distributed=True)
    config = configure(case)
    setup = wrap(case, config, [small(case, config)], initial_loss_scale=2.0**20, hysteresis=1)
    config.grad_scale_func = setup.optimizer.scale_loss
    steps = []
    for step in range(8):
        scale = float(setup.optimizer.get_loss_scale())
        forward_backward(setup, step, RANK)
        steps.append([bool(setup.optimizer.step()[0]), scale])
    return {"steps": steps, "bits": fingerprint(*setup.chunks[0].parameters())}


class Front(Small):
    """The first of two chunks of a model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.outer(torch.tanh(self.inner(x)[0]))[0])  # type: ignore[no-any-return]


def train_chunks() -> dict[str, Any]:
    """Two chunks in one optimizer, watched by ``TrainerMon``."""
    from msmon.pytorch import TrainerMon

    case = Case("Chunks")
    config = configure(case)
    setup = wrap(case, config, [small(case, config, Front), small(case, config)])
    before = traces()
    monitor = TrainerMon("monitor.json", params_have_main_grad=True)
    monitor.set_monitor(setup.chunks, MICRO_BATCHES, setup.optimizer, dp_group=parallel_state.get_data_parallel_group())
    told: list[Any] = []
    for step in range(STEPS):
        for chunk in setup.chunks:
            chunk.zero_grad_buffer()
        setup.optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            setup.chunks[1](setup.chunks[0](data(step, micro, RANK))).pow(2).mean().backward()
        finalize_model_grads(setup.chunks)
        reduced, _ = monitor.generate_wgrad_metrics()
        told.append(
            [reduced["1:module.head.weight"]["norm"], float(setup.chunks[1].module.head.weight.main_grad.norm())]
        )
        setup.optimizer.step()
    during = traces()
    monitor.close()
    return {"told": told, "before": before, "during": during, "after": traces()}


def train_split() -> dict[str, Any]:
    """Layers over both ranks, watched by ``TrainerMon``."""
    from msmon.pytorch import TrainerMon

    case = Case("Split", tensor_ranks=2)
    config = configure(case)
    setup = wrap(case, config, [small(case, config)])
    monitor = TrainerMon("monitor.json")
    monitor.set_monitor(
        setup.chunks, MICRO_BATCHES, setup.optimizer, tp_group=parallel_state.get_tensor_model_parallel_group()
    )
    for step in range(STEPS):
        forward_backward(setup, step, 0)
        setup.optimizer.step()
    monitor.close()
    return {}


def traces() -> list[str]:
    """Where msmon may leave something in Megatron: what is there now."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import distrib_optimizer, optimizer

    buckets = getattr(param_and_grad_buffer, "_ParamAndGradBucketGroup", None) or param_and_grad_buffer.Bucket
    kinds = (buckets, DistributedDataParallel, optimizer.MegatronOptimizer, optimizer.MixedPrecisionOptimizer)
    kinds = (*kinds, optimizer.FP32Optimizer, distrib_optimizer.DistributedOptimizer)
    names = ("__init__", "start_grad_sync", "zero_grad_buffer", "step", "step_with_ready_grads", "prepare_grads")
    return [f"{kind.__name__}.{name} {id(vars(kind)[name])}" for kind in kinds for name in names if name in vars(kind)]


def become_another_version() -> None:
    """Let ``start_grad_sync`` have another name."""
    from megatron.core.distributed import param_and_grad_buffer

    buckets = param_and_grad_buffer._ParamAndGradBucketGroup
    buckets.begin_grad_sync = buckets.start_grad_sync
    del buckets.start_grad_sync
    for caller in (buckets.finish_grad_sync, buckets.register_grad_ready):
        names = ("begin_grad_sync" if name == "start_grad_sync" else name for name in caller.__code__.co_names)
        caller.__code__ = caller.__code__.replace(co_names=tuple(names))


def main(chosen: Sequence[str]) -> None:
    if chosen[:1] == ["--another-version"]:
        become_another_version()
        chosen = chosen[1:]
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        case.label: lambda case=case: observe(case) for case in CASES if trains_here(case)
    }
    if OLD or MINOR >= 14:
        how = Case("Gpt", torch.bfloat16, distributed=True, overlap=True)
        runs["Gpt"] = lambda: train_gpt(how, num_layers=2)
    if MINOR >= 14:
        stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
        runs["Stages"] = lambda: train_gpt(Case("Stages"), num_layers=4, pipeline_dtype=torch.float32, **stages)
        runs["Scaled"] = train_scaled
    alone = {"Chunks": train_chunks, "Split": train_split}
    dist.init_process_group("gloo")
    results = {name: {**alone, **runs}[name]() for name in chosen or runs}
    torch.save(results, os.environ["TRUTH"] + str(RANK))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1:])
