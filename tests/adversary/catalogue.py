"""The groups of trials, by the name that --only takes."""

from tests.adversary import failing_disk, hostile_files, power_cut, run_folders, standard_output

# Groups that need the failing disk, which needs Linux and a C compiler.
ON_A_FAILING_DISK = {
    "faults": (failing_disk.training, "a change of a file fails during training"),
    "commands": (failing_disk.commands, "a change of a file fails during other commands"),
    "power": (power_cut.trials, "the power is cut during training"),
}
GROUPS = {
    **ON_A_FAILING_DISK,
    "folders": (run_folders.trials, "odd entries and damaged files in a run folder"),
    "metrics": (run_folders.monitored, "hostile values in metrics.jsonl"),
    "manifests": (hostile_files.manifests, "manifests changed and signed again"),
    "huggingface": (hostile_files.hugging_face, "hostile Hugging Face folders"),
    "templates": (hostile_files.templates, "hostile chat templates"),
    "output": (standard_output.trials, "standard output that cannot be written"),
}
