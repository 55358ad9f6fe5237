# The `pretrain` that guide 004 prints in section 4, as a program of its own. Its tensor of the start time is
# on the CPU here.
import time

import guide_pretrain
import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.utils import get_model_config
from megatron.training import (
    ft_integration,
    get_args,
    get_one_logger,
    get_timers,
    get_wandb_writer,
    one_logger_utils,
    print_rank_0,
)
from megatron.training.async_utils import maybe_finalize_async_save
from megatron.training.checkpointing import BasicLocalCheckpointManager, save_checkpoint
from megatron.training.initialize import initialize_megatron, set_jit_fusion_options
from megatron.training.training import (
    append_to_progress_log,
    build_train_valid_test_data_iterators,
    evaluate_and_print_results,
    preprocess_common_state_dict,
    print_datetime,
    setup_model_and_optimizer,
    train,
)

_TRAIN_START_TIME = time.time()


def pretrain(
    train_valid_test_dataset_provider,
    model_provider,
    model_type,
    forward_step_func,
    process_non_loss_data_func=None,
    extra_args_provider=None,
    args_defaults={},  # noqa: B006
    get_embedding_ranks=None,
    get_position_embedding_ranks=None,
    non_loss_data_func=None,
):
    initialize_megatron(
        extra_args_provider=extra_args_provider,
        args_defaults=args_defaults,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
    )

    args = get_args()
    timers = get_timers()

    if args.log_progress:
        append_to_progress_log("Starting job")

    set_jit_fusion_options()

    global _TRAIN_START_TIME
    start_time_tensor = torch.tensor([_TRAIN_START_TIME], dtype=torch.double, device="cpu")
    torch.distributed.all_reduce(start_time_tensor, op=torch.distributed.ReduceOp.MIN)
    _TRAIN_START_TIME = start_time_tensor.item()

    app_metrics = {}
    app_metrics["app_start_time"] = round(_TRAIN_START_TIME * 1000.0)
    app_metrics["app_model_init_start_time"] = round(_TRAIN_START_TIME * 1000.0)

    print_rank_0(f"time to initialize megatron (seconds): {time.time() - _TRAIN_START_TIME:.3f}")
    print_datetime("after megatron is initialized")
    app_metrics["app_model_init_finish_time"] = one_logger_utils.get_timestamp_in_ms()

    one_logger_utils.on_pretrain_start()

    if args.non_persistent_ckpt_type == "local":
        checkpointing_context = {
            "local_checkpoint_manager": BasicLocalCheckpointManager(args.non_persistent_local_ckpt_dir)
        }
    else:
        checkpointing_context = {}

    timers("model-and-optimizer-setup", log_level=0).start(barrier=True)
    app_metrics["app_build_optimizer_start_time"] = one_logger_utils.get_timestamp_in_ms()
    model, optimizer, opt_param_scheduler = setup_model_and_optimizer(
        model_provider, model_type, checkpointing_context=checkpointing_context
    )
    timers("model-and-optimizer-setup").stop()
    print_datetime("after model, optimizer, and learning rate scheduler are built")
    app_metrics["app_build_optimizer_finish_time"] = one_logger_utils.get_timestamp_in_ms()

    config = get_model_config(model[0])

    app_metrics["app_build_dataiters_start_time"] = one_logger_utils.get_timestamp_in_ms()
    timers("train/valid/test-data-iterators-setup", log_level=0).start(barrier=True)
    if args.virtual_pipeline_model_parallel_size is not None:
        train_data_iterator = []
        valid_data_iterator = []
        test_data_iterator = []
        for i in range(len(model)):
            mpu.set_virtual_pipeline_model_parallel_rank(i)
            iterators = build_train_valid_test_data_iterators(train_valid_test_dataset_provider)
            train_data_iterator.append(iterators[0])
            valid_data_iterator.append(iterators[1])
            test_data_iterator.append(iterators[2])
    else:
        train_data_iterator, valid_data_iterator, test_data_iterator = build_train_valid_test_data_iterators(
            train_valid_test_dataset_provider
        )
    timers("train/valid/test-data-iterators-setup").stop()
    print_datetime("after dataloaders are built")
    app_metrics["app_build_dataiters_finish_time"] = one_logger_utils.get_timestamp_in_ms()

    one_logger_utils.track_config_flags(
        args.train_iters,
        args.skip_train,
        args.do_train,
        args.do_valid,
        args.do_test,
        args.dataloader_type,
        args.retro_project_dir,
        args.retro_cyclic_train_iters,
    )

    if args.enable_ft_package and ft_integration.get_rank_monitor_client() is not None:
        ft_integration.get_rank_monitor_client().init_workload_monitoring()
        ft_timeouts = ft_integration.get_rank_monitor_client().timeouts
        print_rank_0(f"fault tolerance client initialized: {ft_timeouts}")

    print_rank_0("done with setup ...")
    timers.log(["model-and-optimizer-setup", "train/valid/test-data-iterators-setup"], barrier=True)

    one_logger = get_one_logger()
    one_logger and one_logger.log_metrics(app_metrics)

    if not args.skip_train:
        print_rank_0("training ...")

        if args.dataloader_type == "cyclic" and args.retro_project_dir:
            assert args.retro_cyclic_train_iters is not None
            args.train_iters = args.retro_cyclic_train_iters
            print_rank_0(f"retro cyclic train iters : {args.train_iters}")

        iteration = 0
        if args.do_train and args.train_iters > 0:
            iteration, num_floating_point_operations_so_far = train(
                forward_step_func,
                model,
                optimizer,
                opt_param_scheduler,
                train_data_iterator,
                valid_data_iterator,
                process_non_loss_data_func,
                config,
                checkpointing_context,
                non_loss_data_func,
            )

        print_datetime("after training is done")

        if args.save and iteration != 0 and iteration % args.save_interval != 0:
            save_checkpoint(
                iteration,
                model,
                optimizer,
                opt_param_scheduler,
                num_floating_point_operations_so_far,
                checkpointing_context,
                train_data_iterator=train_data_iterator,
                ft_client=ft_integration.get_rank_monitor_client(
                    ft_integration.StateMachineActions.SAVE_CHECKPOINT
                ),
                preprocess_common_state_dict_fn=preprocess_common_state_dict,
            )

        one_logger and one_logger.log_metrics(
            {"app_train_loop_finish_time": one_logger_utils.get_timestamp_in_ms()}
        )

    else:
        print_rank_0("skipping training (--skip-train is on) ...")
        iteration = args.iteration

    if args.do_valid:
        prefix = f"iteration {iteration} on validation set"
        evaluate_and_print_results(
            prefix,
            forward_step_func,
            valid_data_iterator,
            model,
            iteration,
            process_non_loss_data_func,
            config,
            verbose=True,
            write_to_tensorboard=not args.skip_train,
            non_loss_data_func=non_loss_data_func,
        )

    if args.do_test:
        prefix = f"iteration {iteration} on test set"
        evaluate_and_print_results(
            prefix,
            forward_step_func,
            test_data_iterator,
            model,
            iteration,
            process_non_loss_data_func,
            config,
            verbose=True,
            write_to_tensorboard=not args.skip_train,
            non_loss_data_func=non_loss_data_func,
        )

    wandb_writer = get_wandb_writer()
    if wandb_writer:
        wandb_writer.finish()
    maybe_finalize_async_save(blocking=True)

    one_logger and one_logger.log_metrics({"app_finish_time": one_logger_utils.get_timestamp_in_ms()})
    one_logger_utils.finish()


def add_arguments(parser):
    parser.add_argument("--greeting", default="none")
    return parser


if __name__ == "__main__":
    pretrain(
        guide_pretrain.train_valid_test_datasets_provider,
        guide_pretrain.model_provider,
        ModelType.encoder_or_decoder,
        guide_pretrain.forward_step,
        extra_args_provider=add_arguments,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
    print_rank_0(f"the program's own argument: {get_args().greeting}")
