"""Pipeline schedules: lists of actions (pentatron.layout.schedules), which the loop runs itself."""


def __getattr__(name: str) -> object:
    if name == "get_forward_backward_func":
        raise ImportError(
            f"megatron.core.pipeline_parallel.{name} is not available: schedules are run by train_step() and train() of "
            "megatron.training.training; call one of them"
        )
    raise AttributeError(f"module {__name__} has no attribute {name}")
