"""The command line of the book: ``python -m book``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# where tools/setup_env.py --book puts Sphinx, apart from the course's .venv
PACKAGES = ROOT / ".jfa" / "cache" / "book-packages"
CACHE = ROOT / ".jfa" / "cache" / "book"


def main(argv: list[str] | None = None) -> int:
    """Build the book; 0 only if every chapter ran, Sphinx warned of nothing and every link leads somewhere."""
    options = _parser().parse_args(argv)
    if PACKAGES.is_dir():
        sys.path.insert(0, str(PACKAGES))
    try:
        import myst_nb  # noqa: F401
    except ImportError:
        print("book: Sphinx and its extensions are not here; run make book, or pip install -r requirements-book.txt")
        return 2
    return build(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m book",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Build the book: chapters with their outputs, exercises, API and notes, as HTML that needs no network.",
        epilog="example: one chapter with its exercises and solutions\n"
        "    python -m book --chapters 01 --solutions --to /tmp/book",
    )
    parser.add_argument(
        "--chapters", nargs="*", metavar="NN", help="these chapters only; links to the others become words"
    )
    parser.add_argument(
        "--no-execute", action="store_true", help="show the chapters' code without its outputs (a quick check)"
    )
    parser.add_argument("--solutions", action="store_true", help="add the solutions' pages")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="chapters that run at a time (default: cores)"
    )
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "book", metavar="DIR", help="default: build/book")
    return parser


def build(options: argparse.Namespace) -> int:
    """Run the chapters, write the sources, call Sphinx, read the result."""
    from book import citations, execute, links, pages

    chapters = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py"))
    chosen = [path for path in chapters if options.chapters is None or path.stem[:2] in options.chapters]
    if not chosen:
        print(f"book: no chapter {' '.join(options.chapters)}; there are {' '.join(p.stem[:2] for p in chapters)}")
        return 2
    started = time.monotonic()
    source = CACHE / f"source-{os.getpid()}"
    try:
        print(f"book: {len(chosen)} chapters", flush=True)
        outputs = None if options.no_execute else execute.outputs_of(chosen, ROOT, CACHE / "outputs", options.jobs)
        plan = pages.Plan(ROOT, source, chosen, outputs, options.solutions, only=len(chosen) < len(chapters))
        for missing in pages.write(plan):
            print(f"book: {missing} is not there yet; its chapter names it without a link")
        return _render(source, options.to.resolve(), started)
    except (execute.ChapterFailed, links.BrokenLink, citations.NoSources) as error:
        print(f"book: {error}", file=sys.stderr)
        return 1
    finally:
        import shutil

        shutil.rmtree(source, ignore_errors=True)


def _render(source: Path, target: Path, started: float) -> int:
    """Make HTML from the source folder; return 1 with every warning and every broken link on stderr."""
    import shutil

    from sphinx.cmd.build import main as sphinx

    from book import verify

    shutil.rmtree(target, ignore_errors=True)
    words = ["-q", "-W", "--keep-going", "-E", "-c", str(Path(__file__).parent), "-d", str(source / "_build")]
    status = sphinx([*words, "-b", "html", str(source), str(target)])
    if status:
        print("book: Sphinx warned; each warning above is an error", file=sys.stderr)
        return 1
    found = verify.faults(target, secrets=[str(ROOT)])
    for fault in found:
        print(f"book: {fault}", file=sys.stderr)
    if not found:
        print(f"book: {target / 'index.html'}, {time.monotonic() - started:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
