"""Builds the site of the documents: site.py build|serve FOLDER

The folder gets docs/, which the generator reads, site/, which it writes, and the Python packages of requirements.txt.
"""

import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CONFIG = tomllib.loads((HERE / "zensical.toml").read_text())["project"]
SOURCE = CONFIG["repo_url"] + "/blob/main/"
LINK = re.compile(r"(\]\()([^)\s#]*)((?:#[^)\s]*)?\))")


def packages(folder):
    """Returns the folder with the packages. pip downloads them once."""
    wanted = (HERE / "requirements.txt").read_bytes() + sys.implementation.cache_tag.encode()
    here = folder / ("python-" + hashlib.sha256(wanted).hexdigest()[:8])
    if not here.exists():
        part = here.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
        subprocess.run([*pip, "--target", str(part), "-r", str(HERE / "requirements.txt")], check=True)
        part.rename(here)
    return str(here)


def pages():
    """Returns the groups of the navigation with their pages."""
    for entry in CONFIG["nav"]:
        for group, names in entry.items():
            yield group, [names] if isinstance(names, str) else names


def stage(folder):
    """Copies the documents. Links that leave docs/ lead to the repository, and README.md becomes the first page."""
    docs = folder / "docs"
    shutil.rmtree(docs, ignore_errors=True)
    shutil.copytree(ROOT / "docs", docs)
    shutil.copy(ROOT / "README.md", docs / "index.md")
    for page in docs.rglob("*.md"):
        at = ROOT if page == docs / "index.md" else ROOT / "docs" / page.relative_to(docs).parent

        def moved(match):
            target = match[2]
            if not target or "://" in target or target.startswith("mailto:"):
                return match[0]
            file = (at / target).resolve()
            if file == ROOT / "README.md":
                file = ROOT / "docs" / "index.md"
            if file.is_relative_to(ROOT / "docs"):
                here = docs / file.relative_to(ROOT / "docs")
                return match[1] + pathlib.Path(os.path.relpath(here, page.parent)).as_posix() + match[3]
            return match[1] + SOURCE + file.relative_to(ROOT).as_posix() + match[3]

        page.write_text(LINK.sub(moved, page.read_text()))
    shutil.copy(HERE / "zensical.toml", folder)


def llms(folder):
    """Writes llms.txt (llmstxt.org): the pages by group, each with its first sentence. The Markdown is beside the HTML."""
    lines = [f"# {CONFIG['site_name']}", "", f"> {CONFIG['site_description']}", ""]
    for group, names in pages():
        lines += [f"## {group}", ""]
        for name in names:
            text = (folder / "docs" / name).read_text()
            title, _, rest = text.removeprefix("# ").partition("\n")
            first = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", rest.strip().split("\n\n")[0].replace("\n", " "))
            sentence = re.split(r"(?<=[.:]) ", first)[0]
            lines.append(f"- [{title}]({CONFIG['site_url']}{name}): {sentence}")
            (folder / "site" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "docs" / name, folder / "site" / name)
        lines.append("")
    (folder / "site" / "llms.txt").write_text("\n".join(lines))


def main():
    command, folder = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = packages(folder)
    stage(folder)
    generator = [sys.executable, "-m", "zensical", command, "-f", str(folder / "zensical.toml")]
    if command == "serve":
        return subprocess.call(generator)
    site = folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    if subprocess.call([*generator, "--clean", "--strict"]):
        return "the generator has found the problems above"
    for file in site.rglob("*.html"):
        file.write_text(file.read_text().replace("edit/main/docs/index.md", "edit/main/README.md"))
    llms(folder)
    print(f"{len(list(site.rglob('*.html')))} pages in {site}")


if __name__ == "__main__":
    sys.exit(main())
