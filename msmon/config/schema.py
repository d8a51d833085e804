"""The configuration as a frozen value. Key names are those of the original, so that its files work unchanged."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    field_validator,
    model_validator,
)

from msmon.alerts.catalogue import CATALOGUE

Op = Literal["min", "max", "norm", "mean", "zeros", "nans", "shape", "dtype", "id"]
STATISTIC_OPS: tuple[Op, ...] = ("min", "max", "norm", "mean", "zeros", "nans")
"""The ops that are computed from a tensor's elements; ``shape``, ``dtype`` and ``id`` describe the row."""

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_TIMESTAMP = re.compile(rf"({'|'.join(_MONTHS)})(\d\d)_(\d\d)-(\d\d)-(\d\d)", re.ASCII)
_LEAP_YEAR = 2000
_TENSOR = re.compile(r"tensor|(tuple|list)\[(?P<size>\d{1,9})\](:(?P<place>\d{1,9}))?", re.ASCII)


def _integral(value: object) -> object:
    """Accept ``1e8``, which JSON reads as a float, where a whole number is meant."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _number(value: object) -> object:
    """Accept a whole number where a decimal is meant, and refuse text and booleans."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("must be a number")  # noqa: TRY004 - pydantic turns ValueError into a problem with its path
    return float(value)


def _tensor_place(value: object) -> object:
    match = _TENSOR.fullmatch(value.replace(" ", "")) if isinstance(value, str) else None
    if match is None:
        raise ValueError('must be "tensor" or "tuple[N]:i", such as "tuple[2]:0"')
    size = int(match["size"] or 1)
    if int(match["place"] or 0) >= size:
        which = f"its {size} tensors are 0 to {size - 1}" if size else "it has no tensor"
        raise ValueError(f"names a tensor that is not there: {which}")
    return match[0]


def _moment(stamp: str) -> datetime | None:
    """A timestamp in a leap year; ``None`` when there is no such time in any year."""
    match = _TIMESTAMP.fullmatch(stamp)
    if match is None:
        return None
    day, hour, minute, second = map(int, match.groups()[1:])
    try:
        return datetime(_LEAP_YEAR, _MONTHS.index(match[1]) + 1, day, hour, minute, second)  # noqa: DTZ001 - of a calendar, not of a place
    except ValueError:  # the 30th of February, or 25 o'clock
        return None


def _pattern(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("must be text")  # noqa: TRY004 - as above
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f'must be a regular expression such as "train.py\\[23\\]": {error}') from None
    return value


WholeNumber = Annotated[StrictInt, BeforeValidator(_integral)]
Number = Annotated[float, BeforeValidator(_number)]
TensorPlace = Annotated[str, BeforeValidator(_tensor_place)]
Pattern = Annotated[str, BeforeValidator(_pattern)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Target(_Frozen):
    """Which tensors of a module are watched; with none named, all of them."""

    input: TensorPlace | None = None
    output: TensorPlace | None = None
    input_grad: TensorPlace | None = None
    output_grad: TensorPlace | None = None


class CommunicationConfig(_Frozen):
    """``cc_distribution``: statistics of what communication operators send and receive."""

    enable: StrictBool = False
    cc_codeline: tuple[Pattern, ...] = ()
    cc_pre_hook: StrictBool = False
    cc_log_only: StrictBool = False


class RuleArguments(_Frozen):
    """Arguments of an alert rule; which of them a rule takes, and their defaults, `msmon explain alerts` says."""

    threshold: Number | None = Field(default=None, ge=0)
    factor: Number | None = Field(default=None, gt=1)
    low: Number | None = Field(default=None, ge=0)
    high: Number | None = Field(default=None, gt=0)
    steps: WholeNumber | None = Field(default=None, ge=1)
    warm_up: WholeNumber | None = Field(default=None, ge=1)


RuleName = Literal[
    "AnomalyNan",
    "AnomalyTurbulence",
    "AnomalyInf",
    "AnomalySpike",
    "AnomalyGradient",
    "AnomalyDead",
    "AnomalyUpdateRatio",
    "AnomalyAttentionLogits",
]


class Rule(_Frozen):
    """One alert rule by its name, its arguments, and where it applies: empty filters leave that to the rule."""

    rule_name: RuleName
    args: RuleArguments = RuleArguments()
    kinds: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    ranks: tuple[Annotated[WholeNumber, Field(ge=0)], ...] = ()

    @model_validator(mode="after")
    def _arguments_fit(self) -> Rule:
        entry = CATALOGUE[self.rule_name]
        for name in self.args.model_fields_set - set(entry.arguments):
            known = ", ".join(entry.arguments) or "none"
            raise ValueError(f"{self.rule_name} has no argument `{name}`; its arguments: {known}")
        for name in entry.required:
            if getattr(self.args, name) is None:
                raise ValueError(f'{self.rule_name} needs "args": {{"{name}": …}}, such as 0.5')
        low, high = self.arguments.get("low"), self.arguments.get("high")
        if low is not None and high is not None and low >= high:
            raise ValueError(f"`low` ({low:g}) must be below `high` ({high:g}), else everything is an anomaly")
        return self

    @property
    def arguments(self) -> dict[str, float | None]:
        """Every argument of the rule: as given, else its default."""
        given = {name: getattr(self.args, name) for name in self.args.model_fields_set}
        return {**CATALOGUE[self.rule_name].arguments, **given}


class AlertConfig(_Frozen):
    """``alert``: rules in order, the first that fires names the anomaly; ``dump`` writes anomalies to ``anomaly.json``."""

    rules: tuple[Rule, ...] = ()
    dump: StrictBool = False


class L2Targets(_Frozen):
    """``l2_targets``: modules whose high-order features are recorded."""

    attention_hook: tuple[str, ...] | None = None
    linear_hook: tuple[str, ...] | None = None
    moe_router_weight_hook: tuple[str, ...] | None = None
    moe_router_logit_hook: tuple[str, ...] | None = None


class MonitorConfig(_Frozen):
    """Everything a run is asked to record. `msmon explain configuration` has it in words."""

    targets: dict[str, Target] = Field(
        default_factory=dict,
        description="Module or parameter names to watch; a parameter is watched when its name starts with a target. "
        "`*`, `?` and `[…]` make a target a glob pattern. Empty: everything.",
    )
    param_distribution: StrictBool = Field(
        default=False, description="Weights, before (`param_origin`) and after (`param_updated`) the optimizer step."
    )
    wg_distribution: StrictBool = Field(
        default=False,
        description="Weight gradients: this rank's own (`grad_unreduced`) and as the optimizer uses them (`grad_reduced`).",
    )
    mv_distribution: StrictBool = Field(
        default=False,
        description="Optimizer state before the step: `exp_avg`, `exp_avg_sq` and every other state tensor.",
    )
    xy_distribution: StrictBool = Field(default=False, description="Activations and their gradients.")
    all_xy: StrictBool = Field(
        default=False,
        description="With `xy_distribution`: all modules; those named in `targets` follow their own entry.",
    )
    forward_only: StrictBool = Field(default=False, description="With `xy_distribution`: activations only.")
    backward_only: StrictBool = Field(
        default=False, description="With `xy_distribution`: gradients of activations only."
    )
    monitor_mbs_grad: StrictBool = Field(
        default=False,
        description="With `wg_distribution`: the unreduced gradient after every micro-batch (a running sum), "
        "in rows told apart by the column `micro_step`.",
    )
    mg_direction: StrictBool = Field(
        default=False,
        description="Share of elements whose gradient and first moment agree in sign; 1 at the first step (`other`).",
    )
    ur_distribution: StrictBool = Field(
        default=False,
        description="Adam's update (`update`) and its ratio to the weight (`update_ratio`); with the extra "
        "`msmon[tensorboard]` also their histograms.",
    )
    cc_distribution: CommunicationConfig = Field(
        CommunicationConfig(),
        description="What this rank sends and receives through torch.distributed: see `msmon explain communication`.",
    )
    stack_info: StrictBool = Field(default=False, description="Call stack of every module at the first monitored step.")
    recording_l2_features: StrictBool = Field(
        default=False, description="High-order features of the modules in `l2_targets`; see `msmon explain statistics`."
    )
    l2_targets: L2Targets = Field(
        L2Targets(),
        description="Names or glob patterns of modules by kind of feature: `attention_hook`, `linear_hook`, "
        "`moe_router_weight_hook`, `moe_router_logit_hook`. Empty or no list: none; but `[]` for `linear_hook` is every "
        "module with a matrix.",
    )
    sa_order: Literal["s,b,h,d", "b,s,h,d"] = Field(
        "s,b,h,d",
        description="Dimensions of an attention's query and key: sequence, batch, heads, size of a head.",
    )
    print_struct: StrictBool = Field(
        default=False, description="Write the structure of the model after the first step, then stop the run."
    )
    ops: tuple[Op, ...] = Field(
        ("norm",),
        description="Columns, in this order: `min`, `max`, `norm` (L2), `mean`, `zeros` (share of elements with "
        "absolute value below `eps`), `nans` (count); also `shape`, `dtype` and `id` (order of execution in the step). "
        "`shape` and `dtype` are always there, at the end unless named.",
    )
    eps: Number = Field(1e-8, gt=0, description="Threshold of `zeros`.")
    ndigits: WholeNumber = Field(
        6,
        ge=0,
        le=20,
        description="Decimals in CSV. A value below 0.1 keeps that many significant digits.",
    )
    start_step: WholeNumber = Field(
        0, ge=0, description="First training step that is collected, by the numbers of the training."
    )
    step_interval: WholeNumber = Field(1, ge=1, description="Every how many steps one is collected.")
    collect_times: WholeNumber = Field(100_000_000, ge=0, description="How many steps are collected, then no more.")
    module_ranks: tuple[Annotated[WholeNumber, Field(ge=0)], ...] = Field(
        (), description="Ranks that monitor. Empty: all."
    )
    dynamic_on: StrictBool = Field(
        default=False,
        validation_alias=AliasChoices("dynamic_on", "switch"),
        description="With `DYNAMIC_MONITOR=True`: whether collection is on. Otherwise it has no effect. "
        "The older name `switch` is accepted.",
    )
    alert: AlertConfig = Field(
        AlertConfig(),
        description="Alert rules, and whether anomalies are written to files; see `msmon explain alerts`.",
    )
    format: Literal["csv", "tensorboard", "api"] = Field(
        "csv", description="`csv` files; `tensorboard` event files; `api`: memory only."
    )
    step_count_per_record: WholeNumber = Field(
        1, ge=1, le=1_000_000, description="Steps that one CSV file holds; its name says which."
    )
    append_output: tuple[str, ...] = Field(
        (),
        description="Two timestamps such as `Dec03_21-34-40`: go on in this rank's latest directory between them (inclusive), "
        "unless another process writes to it. Where there is none, a new one is made.",
    )
    squash_name: StrictBool = Field(
        default=False,
        description="Shorten names to the part from `layer(s)`, `embedding(s)`, `final`, `output` or `norm` on.",
    )

    @field_validator("sa_order", mode="before")
    @classmethod
    def _without_blanks(cls, value: object) -> object:
        return value.replace(" ", "") if isinstance(value, str) else value

    @field_validator("ops")
    @classmethod
    def _unique_ops(cls, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        return tuple(dict.fromkeys(ops)) or ("norm",)

    @field_validator("append_output")
    @classmethod
    def _two_timestamps(cls, stamps: tuple[str, ...]) -> tuple[str, ...]:
        moments = [moment for stamp in stamps if (moment := _moment(stamp)) is not None]
        if len(stamps) not in {0, 2} or len(moments) != len(stamps):
            raise ValueError('must be [] or two timestamps, such as ["Dec03_21-34-40", "Dec03_21-34-41"]')
        if moments != sorted(moments):
            raise ValueError(
                "begins after it ends: exchange the two timestamps; to go on with a run over New Year, write its own twice"
            )
        return stamps

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of data that are switched on, in words."""
        kinds = {
            "weights: param_origin, param_updated": self.param_distribution,
            "weight gradients: grad_unreduced, grad_reduced": self.wg_distribution,
            "optimizer state: exp_avg, exp_avg_sq, …": self.mv_distribution,
            "activations: actv": self.xy_distribution and not self.backward_only,
            "gradients of activations: actv_grad": self.xy_distribution and not self.forward_only,
            "directions of gradients: other": self.mg_direction,
            "updates of Adam: update, update_ratio": self.ur_distribution,
            "high-order features: attention_hook, linear_hook, …": self.recording_l2_features,
            "communication: cc": self.cc_distribution.enable,
            "call stacks of modules: stack_info.csv": self.stack_info,
            "the structure of the model, then the run ends: module_struct.json": self.print_struct,
        }
        return tuple(kind for kind, wanted in kinds.items() if wanted)

    @property
    def statistics(self) -> tuple[Op, ...]:
        """The configured ops that are computed from a tensor's elements, in the order of the columns."""
        return tuple(op for op in self.ops if op in STATISTIC_OPS)

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns after the row's names: the ops as configured, then ``shape`` and ``dtype`` unless among them."""
        return (*self.ops, *(op for op in ("shape", "dtype") if op not in self.ops))


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file."""
    schema = MonitorConfig.model_json_schema()
    schema["title"] = "msmon configuration"
    return schema
