"""Values that follow from others. Each derivation records its reason, which `pentatron config` shows."""

import math

from pentatron.config.draft import Draft, Facts

_HEAD_WIDTHS = (64, 32, 16, 8)


def derive(draft: Draft, facts: Facts) -> list[str]:
    """Fills in the open values; returns the problems met on the way."""
    _processes(draft, facts)
    _attention(draft)
    _widths(draft)
    problems = _batches(draft)
    _length(draft)
    _folders(draft)
    return problems


def derive_vocabulary(draft: Draft, vocab_size: int, origin: str) -> None:
    """For callers that learn the vocabulary from a tokenizer, before `derive`."""
    draft.derive("vocab_size", vocab_size, origin)


def _processes(draft: Draft, facts: Facts) -> None:
    model = (
        draft["tensor_model_parallel_size"]
        * draft["pipeline_model_parallel_size"]
        * draft["context_parallel_size"]
    )
    if draft["data_parallel_size"] is None:
        draft.derive(
            "data_parallel_size",
            max(1, facts.world_size // model),
            f"{facts.world_size} processes / (tp × pp × cp = {model})",
        )
    if draft["nproc_per_node"] is None:
        draft.derive("nproc_per_node", facts.local_processes, "processes on this machine")
    if draft["threads_per_process"] is None:
        threads = max(1, facts.cores // max(1, facts.local_processes))
        draft.derive(
            "threads_per_process", threads, f"{facts.cores} cores / {facts.local_processes} processes"
        )


def _attention(draft: Draft) -> None:
    hidden, tp = draft["hidden_size"], draft["tensor_model_parallel_size"]
    if draft["num_attention_heads"] is None:
        fitting = [w for w in _HEAD_WIDTHS if hidden % w == 0 and (hidden // w) % tp == 0]
        width = fitting[0] if fitting else hidden
        draft.derive("num_attention_heads", max(1, hidden // width), f"{hidden} hidden / {width} per head")
    heads = draft["num_attention_heads"]
    if draft["kv_channels"] is None:
        draft.derive("kv_channels", hidden // heads, f"{hidden} hidden / {heads} heads")
    if draft["num_query_groups"] is None:
        draft.derive("num_query_groups", heads, "as many as heads")
    elif draft.given("num_query_groups") and not draft["group_query_attention"]:
        draft.derive("group_query_attention", True, "--num-query-groups is given")


def _widths(draft: Draft) -> None:
    hidden = draft["hidden_size"]
    if draft["ffn_hidden_size"] is None:
        if draft["gated_linear_unit"]:
            draft.derive(
                "ffn_hidden_size", max(64, int(4 * hidden * 2 / 3 / 64) * 64), "8/3 × hidden, in 64s"
            )
        else:
            draft.derive("ffn_hidden_size", 4 * hidden, "4 × hidden")
    if draft["max_position_embeddings"] is None:
        draft.derive("max_position_embeddings", draft["seq_length"], "seq-length")
    if draft["vocab_size"] is None and draft["padded_vocab_size"] is not None:
        draft.derive("vocab_size", draft["padded_vocab_size"], "padded-vocab-size")
    if draft["padded_vocab_size"] is None and draft["vocab_size"] is not None:
        multiple = draft["make_vocab_size_divisible_by"] * draft["tensor_model_parallel_size"]
        padded = math.ceil(draft["vocab_size"] / multiple) * multiple
        draft.derive("padded_vocab_size", padded, f"{draft['vocab_size']} up to a multiple of {multiple}")


def _batches(draft: Draft) -> list[str]:
    """Settles micro and global batch from whichever way the user chose to say it."""
    if draft["rank_batch_size"] is not None:
        explicit = [n for n in ("micro_batch_size", "global_batch_size") if draft.given(n)]
        if explicit and draft.given("rank_batch_size"):
            return [
                "--batch_size and --micro-batch-size/--global-batch-size say the same thing twice; give one of them"
            ]
        if not explicit:
            return _batches_of_a_rank(draft)
    dp = draft["data_parallel_size"]
    steps = draft["gradient_accumulation_steps"] or draft["num_microbatches"]
    micro, total = draft["micro_batch_size"], draft["global_batch_size"]
    if micro is None and total is None:
        micro = 1
        draft.derive("micro_batch_size", micro, "one sample at a time")
    if total is None:
        draft.derive(
            "global_batch_size",
            micro * dp * (steps or 1),
            f"{micro} × {dp} ranks × {steps or 1} micro-batches",
        )
    elif micro is None:
        per_rank = total / dp / (steps or 1)
        if per_rank != int(per_rank):
            return [
                f"--global-batch-size {total} cannot be divided by {dp} data-parallel ranks × {steps or 1} micro-batches; "
                f"use a multiple of {dp * (steps or 1)}"
            ]
        draft.derive(
            "micro_batch_size", int(per_rank), f"{total} / ({dp} ranks × {steps or 1} micro-batches)"
        )
    elif steps is not None and micro * dp * steps != total:
        return [
            f"--global-batch-size {total} ≠ {micro} (micro) × {dp} (data-parallel) × {steps} (micro-batches) = "
            f"{micro * dp * steps}; leave one of them out"
        ]
    return []


def _batches_of_a_rank(draft: Draft) -> list[str]:
    batch, dp = draft["rank_batch_size"], draft["data_parallel_size"]
    cuts, accumulation = draft["num_microbatches"] or 1, draft["gradient_accumulation_steps"] or 1
    if batch % cuts:
        return [f"--batch_size {batch} is not divisible by --num_microbatches {cuts}"]
    draft.derive("micro_batch_size", batch // cuts, f"{batch} per rank / {cuts} micro-batches")
    draft.derive(
        "global_batch_size",
        batch * dp * accumulation,
        f"{batch} per rank × {dp} ranks × {accumulation} accumulated",
    )
    return []


def _length(draft: Draft) -> None:
    if draft["epochs"] is not None and draft["dataset_size"] and draft["global_batch_size"]:
        per_epoch = max(1, draft["dataset_size"] // draft["global_batch_size"])
        limit = draft["epochs"] * per_epoch
        if draft["train_iters"] is None or limit < draft["train_iters"]:
            draft.derive(
                "train_iters", limit, f"{draft['epochs']} epochs × {per_epoch} steps, the nearer limit"
            )
        else:
            draft.notices.append(
                f"training stops after {draft['train_iters']} steps, before {draft['epochs']} epochs of {per_epoch} steps"
            )
    if draft["lr_decay_iters"] is None and draft["train_iters"] is not None:
        draft.derive("lr_decay_iters", draft["train_iters"], "train-iters")
    if draft["lr_warmup_fraction"] is not None and draft["lr_decay_iters"] is not None:
        warmup = int(draft["lr_warmup_fraction"] * draft["lr_decay_iters"])
        draft.derive(
            "lr_warmup_iters", warmup, f"{draft['lr_warmup_fraction']} × {draft['lr_decay_iters']} steps"
        )
    elif not draft.given("lr_warmup_iters") and draft["lr_decay_iters"] is not None:
        # A short run made from a preset or an entry point's defaults must not be all warm-up.
        longest = draft["lr_decay_iters"] // 10
        if draft["lr_warmup_iters"] > longest:
            draft.derive("lr_warmup_iters", longest, "a tenth of the run")


def _folders(draft: Draft) -> None:
    if draft["run_dir"] is None:
        draft.derive("run_dir", f"runs/{draft['preset'] or 'run'}", "runs/NAME")
    if draft["save"] is None:
        draft.derive("save", f"{draft['run_dir']}/checkpoints", "the run folder")
    if draft["load"] is None:
        draft.derive("load", draft["save"], "the run's own checkpoints")
    if draft["save_interval"] is None and draft["train_iters"] is not None:
        draft.derive("save_interval", draft["train_iters"], "at the end only")
