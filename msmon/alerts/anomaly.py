"""An anomaly, its entry in ``anomaly.json``, and the order in which anomalies came to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

BEFORE, FORWARD, BACKWARD, OPTIMIZER = -1, 0, 1, 2

STAGES = {
    "param_origin": BEFORE,
    "actv": FORWARD,
    "linear_hook": FORWARD,
    "attention_hook": FORWARD,
    "adhoc": FORWARD,
    "actv_grad": BACKWARD,
    "grad_unreduced": BACKWARD,
    "grad_reduced": BACKWARD,
    "acc_grad": BACKWARD,
    "post_grad": BACKWARD,
    "cc": BACKWARD,
}
"""Kind of row → part of the step; every other kind belongs to the optimizer, whose state may have any key. Weights as the
forward found them come before everything, as in the original."""


class Signal(NamedTuple):
    """One statistic that a rule objects to.

    Attributes:
        op: The statistic.
        value: Its value.
        rule: Name of the rule.
        because: What the value was compared with, in words; may be empty.
    """

    op: str
    value: float
    rule: str
    because: str

    @property
    def finding(self) -> str:
        """The value, and what it was compared with."""
        because = f" ({self.because})" if self.because else ""
        return f"{self.value:.6g}{because}"


@dataclass(frozen=True)
class Anomaly:
    """One tensor in one step that rules object to.

    Attributes:
        rank: Rank that saw it.
        step: Training step.
        micro_step: Micro-batch of the step; the last one for what happens after all of them.
        pp_stage: Place of the rank in its pipeline.
        vpp_stage: Model chunk.
        call_id: Place of the tensor in the order of execution of its step.
        name: The tensor.
        kind: Kind of row.
        signals: What is wrong with it, at least one.
        group_mates: Ranks of the same pipeline.
    """

    rank: int
    step: int
    micro_step: int
    pp_stage: int
    vpp_stage: int
    call_id: int
    name: str
    kind: str
    signals: tuple[Signal, ...]
    group_mates: tuple[int, ...]

    @property
    def tag(self) -> str:
        """``{vpp}:{name}/rank{R}/{kind}``."""
        return f"{self.vpp_stage}:{self.name}/rank{self.rank}/{self.kind}"

    @property
    def key(self) -> str:
        """Its key in ``anomaly.json``."""
        return f"{self.tag}_step_{self.step}_call_{self.call_id}"

    @property
    def message(self) -> str:
        """One line with every statistic that is wrong."""
        by_rule: dict[str, dict[str, list[str]]] = {}
        for signal in self.signals:
            by_rule.setdefault(signal.rule, {}).setdefault(signal.finding, []).append(signal.op)
        said = {rule: [f"{'/'.join(ops)} {what}" for what, ops in by.items()] for rule, by in by_rule.items()}
        found = "; ".join(f"{rule}: {', '.join(findings)}" for rule, findings in said.items())
        return f"{found} in {self.tag} at step {self.step}"

    def entry(self) -> dict[str, Any]:
        """What ``anomaly.json`` says of it."""
        return {
            "rank": self.rank,
            "step": self.step,
            "micro_step": self.micro_step,
            "pp_stage": self.pp_stage,
            "vpp_stage": self.vpp_stage,
            "call_id": self.call_id,
            "tag_name": self.tag,
            "message": self.message,
            "group_mates": list(self.group_mates),
        }


def stage_of(kind: str) -> int:
    """The part of the step that a kind of row belongs to."""
    return STAGES.get(kind, OPTIMIZER)


class Order(NamedTuple):
    """Sorts anomalies by when they came to be; the last three make the order total."""

    step: int
    micro_step: int
    stage: int
    vpp_stage: int
    pp_stage: int
    call_id: int
    rank: int
    tag_name: str
    key: str


def order_of(key: str, entry: Mapping[str, Any]) -> Order:
    """When an entry of ``anomaly.json`` came to be.

    Step, micro-batch, forward before backward before optimizer; pipeline stages ascending in the forward and descending
    otherwise; then the order of execution. Weights as the forward found them stand before all micro-batches.
    """
    kind = entry["tag_name"].rpartition("/")[2]
    stage = stage_of(kind)
    direction = 1 if stage == FORWARD else -1
    return Order(
        entry["step"],
        entry["micro_step"],
        stage,
        direction * entry["vpp_stage"],
        direction * entry["pp_stage"],
        entry["call_id"],
        entry["rank"],
        entry["tag_name"],
        key,
    )
