"""Each replica reads exactly its samples of Megatron's global sample order.

Stock's own sampler, told that it is the only data-parallel rank, yields the order in which a
single process would consume the data set. That stream is cut into global batches, and of each
global batch a replica takes the intervals that its plan gives it. So every plan consumes the same
samples in the same step as a single process, for every sampler that stock has.
"""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, count
from typing import Any

import torch.utils.data

from zorse_megatron.adapter.groups.global_groups import first_stage, one_data_parallel_rank
from zorse_megatron.runtime.batch_sampler import PlanBatchSampler
from zorse_megatron.runtime.course import Course

LoaderBuilder = Callable[[Any, int], Any]


def plan_loader_builder(
    stock: LoaderBuilder, *, global_batch_size: int, course: Course
) -> LoaderBuilder:
    """Wrap stock's `build_pretraining_data_loader` so that its loaders follow the plan.

    `course`: of the training, whose loader stock builds first; evaluations stay as the plan's file
    has them.
    """
    courses = chain([course], (Course(course.at(0)) for _ in count()))

    def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
        with one_data_parallel_rank():
            loader = stock(dataset, consumed_samples)
        own = next(courses)
        if loader is None or not own.at(0):
            return loader
        sampler: Any = PlanBatchSampler(
            loader.batch_sampler,
            global_batch_size=global_batch_size,
            course=own,
        )
        # A loader's sampler cannot be replaced, so the loader is built again around ours.
        return torch.utils.data.DataLoader(
            loader.dataset,
            batch_sampler=sampler,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            persistent_workers=loader.persistent_workers,
            worker_init_fn=loader.worker_init_fn,
            collate_fn=loader.collate_fn,
        )

    return build_pretraining_data_loader


def datasets_on_rank_0(stock: Callable[..., Any], *, rank: int) -> Callable[..., Any]:
    """Wrap stock's `build_train_valid_test_datasets`: rank 0 builds whatever stage it is on.

    Stock takes it for granted that rank 0 is on the first stage: rank 0 alone writes the index
    files that the others read, and decides for all whether there is anything to train on.
    """

    def build_train_valid_test_datasets(*args: Any, **kwargs: Any) -> Any:
        with first_stage() if rank == 0 else nullcontext():
            return stock(*args, **kwargs)

    return build_train_valid_test_datasets
