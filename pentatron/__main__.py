"""Runs the `pentatron` command for `python -m pentatron`."""

# Imports at module level run before `leave_current_folder`, when a file in the current folder could shadow
# them.
import os
import sys


def main() -> int:
    try:
        # Imported here so that Ctrl-C during the import gets a message instead of a traceback.
        from pentatron.cli.main import main as command
    except KeyboardInterrupt:
        import contextlib

        with contextlib.suppress(OSError):
            os.write(2, b"pentatron: interrupted during startup\n")
        return 130
    return command()


def leave_current_folder() -> None:
    """Removes the current folder from `sys.path`, so that its files cannot shadow packages.

    `python -m` puts it first. If pentatron itself is a checkout in that folder, the folder moves to the end
    of `sys.path` and, for child processes, of PYTHONPATH. The user's PYTHONPATH entries are kept.
    """
    try:
        current = ("", os.getcwd())  # noqa: PTH109
    except OSError:
        # The folder was deleted, so nothing can be imported from it.
        return
    if sys.flags.safe_path or not sys.path or sys.path[0] not in current:
        return
    del sys.path[0]
    package = __file__.removesuffix("__main__.py")
    # What `import pentatron` would load now. Asks the finders, because `sys.modules` already has the package.
    specs = (finder.find_spec("pentatron", None) for finder in sys.meta_path)
    if next((spec.origin for spec in specs if spec is not None), None) == f"{package}__init__.py":
        return
    checkout = package.removesuffix(f"{os.sep}pentatron{os.sep}")
    sys.path.append(checkout)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{before}{os.pathsep}{checkout}" if before else checkout


if __name__ == "__main__":
    leave_current_folder()
    sys.exit(main())
