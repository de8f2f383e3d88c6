"""Builds the site of the documents: site.py build|serve FOLDER, or site.py versions FOLDER ARCHIVE…

The folder of build and serve gets docs/, which the generator reads, site/, which it writes, and the Python packages of
requirements.txt. That of versions gets the sites of all releases, from their archives outbox_VERSION_site.tar.gz.
"""

import hashlib
import json
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
BADGES = re.compile(r"^(\[!\[.*\n)+\n", re.MULTILINE)
ARCHIVE = re.compile(r"_(v(\d+)\.(\d+)\.(\d+)(-[^_]+)?)_site\.tar\.gz$")
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
    """Copies the documents. Links that leave docs/ lead to the repository, and README.md becomes the first page.

    Its badges, which are images of other servers, are left out.
    """
    docs = folder / "docs"
    shutil.rmtree(docs, ignore_errors=True)
    shutil.copytree(ROOT / "docs", docs)
    (docs / "index.md").write_text(BADGES.sub("", (ROOT / "README.md").read_text()))
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


def versions(folder, archives):
    """Unpacks the sites of releases: each as its version, and the last one that is no pre-release as latest/, too.

    versions.json fills the version selector, and the first page leads to latest/.
    """
    found = {}
    for archive in archives:
        match = ARCHIVE.search(archive)
        if not match:
            return f"{archive} is not the archive of a site"
        found[match[1]] = (not match[5], *map(int, match.group(2, 3, 4)), match[5] or ""), archive
    latest = max(found, key=lambda version: found[version][0])
    shutil.rmtree(folder, ignore_errors=True)
    for version, (_, archive) in found.items():
        for name in [version, "latest"] if version == latest else [version]:
            (folder / name).mkdir(parents=True)
            subprocess.run(["tar", "-xzf", archive, "-C", str(folder / name)], check=True)
    for name in ["llms.txt", "404.html"]:
        shutil.copy(folder / "latest" / name, folder)
    (folder / "index.html").write_text('<!doctype html><meta http-equiv="refresh" content="0; url=latest/"><a href="latest/">outbox</a>\n')
    newest = sorted(found, key=lambda version: found[version][0][1:4], reverse=True)
    entries = [{"version": v, "title": v, "aliases": ["latest"] if v == latest else []} for v in newest]
    (folder / "versions.json").write_text(json.dumps(entries, indent=1) + "\n")


def main():
    command, folder = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    if command == "versions":
        return versions(folder, sys.argv[3:])
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
