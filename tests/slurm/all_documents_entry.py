"""The usual entry on all of stock's mock documents: ranks that are forked for tests have fewer."""

from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

from zorse_megatron.pretrain import main

STOCK_SIZE = 100_000

if __name__ == "__main__":
    MockGPTLowLevelDataset.size = STOCK_SIZE
    main()
