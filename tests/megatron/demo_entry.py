"""`python -m zorse_megatron.demo` with batches of a quarter of their size."""

import typer

from zorse_megatron import demo

if __name__ == "__main__":
    demo.GLOBAL_BATCH_SIZE //= 4
    typer.run(demo.main)
