"""Gradients over data-parallel ranks: flat buckets and ZeRO (pentatron.optim, pentatron.parallel), which the loop applies itself."""


def __getattr__(name: str) -> object:
    if name in ("DistributedDataParallel", "DistributedDataParallelConfig", "finalize_model_grads"):
        raise ImportError(
            f"megatron.core.distributed.{name} is not available: setup_model_and_optimizer() returns models whose gradients the "
            "loop and train_step() reduce themselves; leave it out"
        )
    raise AttributeError(f"module {__name__} has no attribute {name}")
