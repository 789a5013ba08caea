"""The usual entry, with optimizer state that is stepped in small pieces."""

from tests.megatron.small_pieces import use_small_pieces
from zorse_megatron import pretrain
from zorse_megatron.adapter import cpu_mode

if __name__ == "__main__":
    use_small_pieces()
    if cpu_mode.needed():
        cpu_mode.enable()
    pretrain.main()
