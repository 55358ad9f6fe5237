"""`python -m pentatron` is the same as `pentatron`."""

# Nothing else here: what is imported before `leave_current_folder` may be a file of the current folder.
import os
import sys


def main() -> int:
    try:
        # Here, so that Ctrl-C is answered with a sentence from the first moment on.
        from pentatron.cli.main import main as command
    except KeyboardInterrupt:
        import contextlib

        with contextlib.suppress(OSError):
            os.write(2, b"pentatron: stopped before anything was done\n")
        return 130
    return command()


def leave_current_folder() -> None:
    """Removes the current folder from the import path, where `python -m` puts it first: files in it must not stand in for packages.

    A checkout that is not installed stays usable from its own folder: that moves to the end of the path, and to the end of PYTHONPATH for
    the processes which this one starts. PYTHONPATH of the user counts as ever.
    """
    try:
        current = ("", os.getcwd())  # noqa: PTH109
    except OSError:
        # It is gone, so that nothing is imported from it.
        return
    if sys.flags.safe_path or not sys.path or sys.path[0] not in current:
        return
    del sys.path[0]
    package = __file__.removesuffix("__main__.py")
    if _found_by_now() == f"{package}__init__.py":
        return
    checkout = package.removesuffix(f"{os.sep}pentatron{os.sep}")
    sys.path.append(checkout)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{before}{os.pathsep}{checkout}" if before else checkout


def _found_by_now() -> str | None:
    """The file that Python would import as this package; it has done so already, so the finders are asked themselves."""
    found = (finder.find_spec("pentatron", None) for finder in sys.meta_path)
    return next((spec.origin for spec in found if spec is not None), None)


if __name__ == "__main__":
    leave_current_folder()
    sys.exit(main())
