"""What a measuring process is asked to measure, and what it answers, as lines of JSON."""

import dataclasses
import json
from dataclasses import dataclass

from zorse_megatron.schema.gpus.gpu import Attention
from zorse_megatron.schema.profile.profile import Part


@dataclass(frozen=True, kw_only=True)
class LayerRequest:
    """What is still to be measured of one model on one kind of GPU."""

    first_sizes: dict[Part, int]
    """Part -> micro-batch size to start with."""
    largest_size: int
    """No larger micro-batches."""
    time_limit_s: float
    """No larger micro-batches after one whose forward and backward took longer."""
    memory_limit_bytes: int | None
    """No larger micro-batches that would come near to it; None: until memory runs out, which a
    GPU survives and a host does not."""

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(line: str) -> "LayerRequest":
        """Read it back."""
        return LayerRequest(**json.loads(line))


@dataclass(frozen=True, kw_only=True)
class MeasuredPass:
    """One micro-batch through one part of the model."""

    part: Part
    micro_batch_size: int
    forward_s: float
    backward_s: float
    parameters: int
    kept_bytes: int
    """From forward to backward, without input and output."""
    peak_bytes: int
    """While both run."""
    attention: Attention | None = None
    """What core attention ran; None: the part has none."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The optimizer's step on all parameters of the model that was built."""

    num_parameters: int
    update_s: float
    context_bytes: int | None = None
    """What the process then has on its GPU beside torch's allocator; None: not on a GPU."""


Answer = MeasuredPass | MeasuredStep


def answer_to_json(answer: Answer) -> str:
    """Return an answer as one line."""
    return json.dumps(dataclasses.asdict(answer))


def answer_from_json(line: str) -> Answer:
    """Read an answer back."""
    values = json.loads(line)
    return MeasuredPass(**values) if "part" in values else MeasuredStep(**values)
