"""Write the tree of README.md: a module's line is the start of its docstring, a page's its title."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
OPENING, CLOSING = "<!-- tree: ci/tree.py writes this -->\n```\n", "```\n<!-- end of tree -->\n"
COLUMN = 30
# Folders with many files of one kind have one line for all.
ONE_LINE_FOLDERS = ("docs/pictures", "fsdp_sim/corpus", "tests")
# Files that cannot describe themselves in a docstring.
LINES = {
    ".ci/run": "what continuous integration calls: ci/test",
    "ARCHITECTURE.md": "the two doors, the way of the data, the words: one page",
    "CHANGELOG.md": "what changed for users",
    "CONTRIBUTING.md": "how to change something here",
    "LICENSE": "Apache-2.0",
    "ci/constraints.txt": "the exact versions that both commands install",
    "ci/demo": "first command: train a sharded model on simulated ranks, catch two bugs",
    "ci/nightly": "search for programs that fail, by time or number",
    "ci/setup.sh": "the virtual environment of these commands, made or reused",
    "ci/test": "second command: every check",
    "docs/pictures/": "pictures of the pages, as their commands draw them",
    "fsdp_sim/corpus/": "programs that once failed, replayed by the tests",
    "pyproject.toml": "packaging, and the settings of every tool",
    "tests/": "tests/README.md says which test goes where",
}
FOLDERS = ("fsdp_core", "fsdp_sim", "examples", "docs", "tests", "ci", ".ci")
UNLISTED = (".gitignore", "README.md", "py.typed", "__init__.py")


def tracked_files() -> list[str]:
    """Return the files that git knows, in order of name: add a new one before its line is written."""
    command = ["git", "ls-files", "--cached"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in listing.splitlines() if (ROOT / name).exists())


def reading_order() -> dict[str, int]:
    """Number the modules of both packages as the layer contracts list them, top down."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = [
        f"{container}/{module.strip(' ()')}"
        for contract in settings["tool"]["importlinter"]["contracts"]
        for container in contract.get("containers", [])
        for layer in contract["layers"]
        for module in layer.replace("|", ":").split(":")
    ]
    return {name: position for position, name in enumerate(names)}


def entries() -> list[str]:
    """Return what the tree lists, files and one-line folders, in order of reading."""
    order = reading_order()
    names: dict[str, None] = {}
    for file in tracked_files():
        folder = next((f"{f}/" for f in ONE_LINE_FOLDERS if file.startswith(f"{f}/")), None)
        if folder or not file.endswith(UNLISTED):
            names[folder or file] = None

    def position(name: str) -> tuple[int, int, str]:
        folder, slash, rest = name.partition("/")
        module = f"{folder}/{rest.split('/')[0].removesuffix('.py')}"
        return FOLDERS.index(folder) if slash else -1, order.get(module, len(order)), name

    return sorted(names, key=position)


def line_of(name: str) -> str:
    """Return the line that describes a file or folder.

    Raises:
        SystemExit: nothing describes it.
    """
    if name in LINES:
        return LINES[name]
    if name.endswith(".md"):
        return (ROOT / name).read_text().partition("\n")[0].removeprefix("# ")
    if name.endswith(".py"):
        docstring = ast.get_docstring(ast.parse((ROOT / name).read_text()))
        if docstring:
            return docstring.split("\n\n")[0].replace("\n", " ").removesuffix(".")
    sys.exit(f"{name} must have a docstring, or a line in ci/tree.py, for README's tree")


def tree() -> str:
    """Return the tree as README.md shows it, without its fence."""
    lines: list[str] = []
    open_folder = ""
    for name in entries():
        folder, slash, rest = name.partition("/")
        if slash and rest and folder != open_folder:
            open_folder = folder
            lines.append(f"\n{folder}/")
        shown = f"    {rest}" if rest else name
        lines.append(f"{shown:<{COLUMN}} {line_of(name)}")
    return "\n".join(lines) + "\n"


def with_tree(readme: str) -> str:
    """Return the text of README.md with its tree as the files are now."""
    before, _, rest = readme.partition(OPENING)
    _, _, after = rest.partition(CLOSING)
    return before + OPENING + tree() + CLOSING + after


if __name__ == "__main__":
    README.write_text(with_tree(README.read_text()))
