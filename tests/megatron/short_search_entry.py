"""`zorse` with a short search, for commands whose plan need not be the fastest."""

from tests.printed import searching_little
from zorse_megatron.cli.main import app

if __name__ == "__main__":
    with searching_little():
        app()
