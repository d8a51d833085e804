"""``TrainerMon``: the calls that users of the original have in their scripts."""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from msmon import log
from msmon.backends.pytorch.first_step import FirstStep
from msmon.backends.pytorch.naming import class_name, innermost
from msmon.backends.pytorch.place import current_place
from msmon.backends.pytorch.roots import optimizer_parameters
from msmon.backends.pytorch.session import Session
from msmon.config.load import load_config, parse_config
from msmon.config.schema import STATISTIC_OPS
from msmon.errors import ArgumentError
from msmon.plan.names import unique_label
from msmon.runtime.guard import Guard
from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from msmon.backends.pytorch.watch import Watch
    from msmon.record.table import Row

ADHOC = "adhoc"
"""The kind of rows that :meth:`TrainerMon.adhoc_check` makes."""

Metrics = dict[str, dict[str, float]]
"""Name of a row → statistic → value."""


class TrainerMon:
    """Watches a model from inside the training script.

    Args:
        config_file_path: The JSON configuration.
        process_group: Pipeline-parallel group, for the order of anomalies between stages.
        params_have_main_grad: Read ``main_grad`` where a parameter has one. Without any, ``.grad`` is read and that is
            said once.

    Raises:
        ConfigError: The configuration cannot be used.
    """

    def __init__(
        self,
        config_file_path: str | PathLike[str],
        process_group: dist.ProcessGroup | None = None,
        params_have_main_grad: bool = True,  # noqa: FBT001, FBT002 - the original's signature
    ) -> None:
        if not isinstance(params_have_main_grad, bool):
            raise ArgumentError(_wrong("params_have_main_grad", params_have_main_grad, "True or False"))
        self._session = Session(
            load_config(config_file_path),
            on_training=self._adopt,
            config_path=os.fspath(config_file_path),
            pipeline=self._pipeline,
        )
        self._process_group = process_group
        self._main_grad = params_have_main_grad
        self._labels: list[str] = []
        self._wrapped_optimizer: Optimizer | None = None

    def set_monitor(  # noqa: PLR0917 - the original's signature
        self,
        model: Module | Sequence[Module],
        grad_acc_steps: int = 1,
        optimizer: Optimizer | None = None,
        dp_group: dist.ProcessGroup | None = None,
        tp_group: dist.ProcessGroup | None = None,
        start_iteration: int = 0,
    ) -> None:
        """Watch a model. A second call goes on with the same one, or watches another, whose class begins its names.

        Args:
            model: A module, or the chunks of one as a list: their index goes to the column ``vpp_stage``.
            grad_acc_steps: Micro-batches of a training step.
            optimizer: What trains it; wrappers that keep theirs in ``.optimizer`` are looked into.
            dp_group: Data-parallel group: of the reduced gradients, equal on all its ranks, only the first writes rows.
            tp_group: Tensor-parallel group: the same for parameters without ``tensor_model_parallel``.
            start_iteration: Number of the first training step.

        Raises:
            ArgumentError: An argument is of the wrong type.
        """
        given: tuple[Any, Any] = grad_acc_steps, optimizer
        if hasattr(grad_acc_steps, "step"):  # set_monitor(model, optimizer, grad_acc_steps), in the order of the names
            given = (1 if optimizer is None else optimizer), grad_acc_steps
        chunks = _modules(model)
        _whole_number("grad_acc_steps", given[0], 1)
        _whole_number("start_iteration", start_iteration, 0)
        inner = _optimizers(given[1])
        for known in self._session.watches:
            same = any(reference() is chunk for reference in known.roots for chunk in chunks)
            if same or any(map(known.owns, inner)):
                for each in inner:
                    known.add_optimizer(each)
                return
        label = unique_label(class_name(innermost(chunks[0])), self._labels)
        self._labels.append(label)
        further = len(self._labels) > 1
        watch = Guard(f"monitoring of {label}").run(
            self._session.watch,
            chunks,
            inner,
            label=label if further else "",
            prefixes=[f"{label}." if further else ""] * len(chunks),
            raw_names=True,
            first_step=FirstStep(operator.index(start_iteration), "start_iteration"),
            grad_acc_steps=given[0],
            main_grad=self._main_grad,
        )
        if watch is None:
            return
        watch.reports.run(
            watch.inventory.mark_duplicates,
            lambda parameter: _another_rank_writes(parameter, watch.adapter.place(parameter), dp_group, tp_group),
        )
        if self._main_grad and not any(hasattr(parameter, "main_grad") for c in chunks for parameter in c.parameters()):
            log.say("params_have_main_grad=True, but no parameter has main_grad: reading .grad", once="main_grad")

    @property
    def ops(self) -> list[str]:
        """What is computed: the configured ``ops``. May be set while training; the next step follows it."""
        return list(self._session.config.ops)

    @ops.setter
    def ops(self, ops: Sequence[str]) -> None:
        document = self._session.config.model_dump(mode="json", exclude_unset=True)
        self._session.reconfigure(parse_config({**document, "ops": list(ops)}, source="TrainerMon.ops"))

    def reload_xy(self, xy_distribution: bool = False) -> None:  # noqa: FBT001, FBT002 - the original's signature
        """Switch activations on or off while training; the next step follows it."""
        document = self._session.config.model_dump(mode="json", exclude_unset=True)
        changed = {**document, "xy_distribution": xy_distribution}
        self._session.reconfigure(parse_config(changed, source="TrainerMon.reload_xy"))

    def generate_wgrad_metrics(self, post_grad_dict: object = None) -> tuple[Metrics, Metrics]:
        """Statistics of the gradients as they are now.

        Args:
            post_grad_dict: Taken for the original's sake, and not used.

        Returns:
            ``(reduced, unreduced)``: name → statistic → value; of several chunks, ``stage:name``. Empty unless ``wg_distribution`` is on.
        """
        del post_grad_dict
        reduced: Metrics = {}
        unreduced: Metrics = {}
        for watch in self._session.watches:
            statistics = watch.config.statistics
            for target, rows in zip((reduced, unreduced), watch.current_gradients(), strict=True):
                for row, numbers in rows:
                    target[self._qualified(watch, row)] = _by_statistic(statistics, numbers)
        return reduced, unreduced

    def generate_xy_metrics(self) -> tuple[Metrics, Metrics]:
        """Statistics of the activations of the step under way; until it has any, those of the step before.

        Returns:
            ``(actv, actv_grad)``: ``module.output:micro_step`` → statistic → value; of several chunks, ``stage:…``.
            Empty unless ``xy_distribution`` is on.
        """
        found: tuple[Metrics, Metrics] = {}, {}
        for watch in self._session.watches:
            for target, rows in zip(found, watch.current_activations(), strict=True):
                for row, numbers in rows:
                    name = f"{self._qualified(watch, row)}:{row.micro_step}"
                    target[name] = _by_statistic(watch.config.statistics, numbers)
        return found

    @staticmethod
    def _qualified(watch: Watch, row: Row) -> str:
        return f"{row.stage}:{row.name}" if len(watch.roots) > 1 else row.name

    def adhoc_check(
        self,
        target_tensor: Tensor,
        module_name: str,
        tensor_name: str,
        rank_list: Sequence[int] | None,
        ops_list: Sequence[str],
    ) -> None:
        """Record statistics of any tensor in the training step under way, in the file ``adhoc``.

        Args:
            target_tensor: Is only read.
            module_name: First part of the row's name.
            tensor_name: Last part of the row's name.
            rank_list: Ranks that record it; none means all.
            ops_list: Statistics: the columns of the file.

        Raises:
            ArgumentError: Not a tensor, or an unknown statistic.
        """
        if not isinstance(target_tensor, torch.Tensor):
            raise ArgumentError(_wrong("target_tensor", target_tensor, "a tensor"))
        unknown = [op for op in ops_list if op not in STATISTIC_OPS]
        if unknown or not ops_list:
            raise ArgumentError(_wrong("ops_list", list(ops_list), f"a list of {', '.join(STATISTIC_OPS)}"))
        if rank_list and current_place().rank not in rank_list:
            return
        if not self._session.watches:
            log.say("adhoc_check records nothing before set_monitor", once="adhoc_check")
            return
        statistics = [Statistic(op) for op in ops_list]
        self._session.watches[0].add_tensor(ADHOC, f"{module_name}.{tensor_name}", target_tensor, statistics)

    def set_wrapped_optimizer(self, optimizer: Optimizer) -> None:
        """Going away: hand the optimizer to :meth:`set_monitor`."""
        log.say("set_wrapped_optimizer goes away: pass the optimizer to set_monitor", once="set_wrapped_optimizer")
        _optimizers(optimizer)
        self._wrapped_optimizer = optimizer

    def monitor_gnorm_with_ad(  # noqa: PLR0917 - the original's signature
        self,
        model: Module | Sequence[Module],
        grad_acc_steps: int = 1,
        optimizer: Optimizer | None = None,
        dp_group: dist.ProcessGroup | None = None,
        tp_group: dist.ProcessGroup | None = None,
        start_iteration: int = 0,
    ) -> None:
        """Going away: :meth:`set_monitor` is the same, with the optimizer required."""
        log.say("monitor_gnorm_with_ad goes away: call set_monitor", once="monitor_gnorm_with_ad")
        optimizer = self._wrapped_optimizer if optimizer is None else optimizer
        self.set_monitor(model, grad_acc_steps, optimizer, dp_group, tp_group, start_iteration)

    def close(self) -> None:
        """Stop watching: what was collected is on disk, and no hook, patch, handler or thread is left."""
        self._session.close()

    def _pipeline(self) -> tuple[int, list[int]]:
        """Place of this rank in its pipeline, and the ranks of that."""
        if self._process_group is None:
            return 0, []
        return dist.get_rank(self._process_group), dist.get_process_group_ranks(self._process_group)

    def _adopt(self, stepping: Optimizer | None) -> None:
        """An optimizer steps that was not given, on parameters of a watched model: one inside the one given, say."""
        if stepping is None:
            return
        for watch in self._session.watches:
            if any(id(parameter) in watch.inventory.by_id for parameter in optimizer_parameters(stepping)):
                watch.add_optimizer(stepping)
                return


def _by_statistic(statistics: Sequence[str], numbers: Tensor) -> dict[str, float]:
    return dict(zip(statistics, numbers.reshape(-1).tolist(), strict=True))


def _modules(model: object) -> list[Module]:
    chunks: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            raise ArgumentError(_wrong("model", chunk, "a torch.nn.Module, or a list of them"))
    if not chunks:
        raise ArgumentError("`model` is an empty list", hint="pass the model")
    return chunks


def _optimizers(optimizer: object) -> list[Optimizer]:
    """The torch optimizers inside whatever a framework has put around them."""
    seen = optimizer
    while not (isinstance(seen, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in vars(seen)):
        chained = getattr(seen, "chained_optimizers", None)  # Megatron's; one without parameters has no optimizer
        if chained:
            return [inner for each in chained if each.optimizer is not None for inner in _optimizers(each)]
        inner = getattr(seen, "optimizer", None)
        if inner is None or inner is seen:
            raise ArgumentError(_wrong("optimizer", optimizer, "a torch.optim.Optimizer, or a wrapper with .optimizer"))
        seen = inner
    return [seen]


def _whole_number(name: str, value: object, least: int) -> None:
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # TypeError is what is wanted
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ArgumentError(_wrong(name, value, f"a whole number, {least} or more"))


def _wrong(name: str, value: object, wanted: str) -> str:
    return f"`{name}` must be {wanted}, not {type(value).__name__}: {str(value)[:80]}"


def _another_rank_writes(parameter: Tensor, place: Mapping[str, Any], dp_group: object, tp_group: object) -> bool:
    """Whether the first rank of a group writes the same reduced gradient; when it is in parts, each rank has another."""
    in_parts = "shape" in place or "flat_offset" in place
    if dp_group is not None and not in_parts and dist.get_rank(dp_group) != 0:  # type: ignore[arg-type]  # whatever the caller uses as a group
        return True
    parallel = bool(getattr(parameter, "tensor_model_parallel", False))
    return tp_group is not None and not parallel and dist.get_rank(tp_group) != 0  # type: ignore[arg-type]  # as above
