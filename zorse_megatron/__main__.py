"""`python -m zorse_megatron` is `zorse`: for torchrun, which starts modules."""

from zorse_megatron.cli.main import app

app(prog_name="zorse")
