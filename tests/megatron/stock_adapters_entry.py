"""The recording entry, in which one process of stock has adapters alone to train.

They are added to stock's model with the values that they have under a plan; all else is stock's,
with its own layers of experts.
"""

from types import SimpleNamespace
from typing import Any

from tests.megatron.recording_entry import record
from zorse_megatron.adapter import cpu_mode
from zorse_megatron.inputs.lora import parse_lora

ADAPTERS = "rank=3,alpha=6,targets=q,k,v,o"


def main() -> None:
    if cpu_mode.needed():
        cpu_mode.enable()
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.training import get_args

    from zorse_megatron.adapter.model.lora import add_adapters, initial_values

    lora = parse_lora(ADAPTERS, [])
    assert lora is not None
    build = GPTModel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        add_adapters(self, lora)
        parts = {each: SimpleNamespace(shape=each.shape) for each in self.parameters()}
        chunk = SimpleNamespace(parts=parts, decoder=self.decoder)
        with torch.no_grad():
            for parameter, value in initial_values(chunk, 0, get_args().seed):
                parameter.copy_(value)

    GPTModel.__init__ = init
    # Nothing ever takes back what it counts where the bias is frozen.
    TopKRouter._apply_expert_bias = lambda *_, **__: None
    record()


if __name__ == "__main__":
    main()
