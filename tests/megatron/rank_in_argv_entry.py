"""`zorse_megatron.pretrain` with RANK in its arguments replaced by the rank."""

import os
import sys

from zorse_megatron.pretrain import main

if __name__ == "__main__":
    sys.argv = [word.replace("RANK", os.environ["RANK"]) for word in sys.argv]
    main()
