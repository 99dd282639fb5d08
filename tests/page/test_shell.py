"""The modules: joined into one script they keep their meaning, and they ask for nothing outside."""

from __future__ import annotations

import re
from importlib import resources

from clearhead.page.shell import DATA, MODULES, script, shell, static

KINDS = "(?:async )?(?:const|let|function|class)"
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";$', re.MULTILINE)


def test_every_module_is_in_the_joined_page():
    folder = resources.files("clearhead.page") / "static"
    assert sorted(MODULES) == sorted(path.name for path in folder.iterdir() if path.name.endswith(".js"))


def test_every_module_stands_after_those_it_imports():
    seen: set[str] = set()
    for module in MODULES:
        text = static(module)
        assert len(IMPORT.findall(text)) == len(re.findall(r"^import ", text, re.MULTILINE)), module
        for names, source in IMPORT.findall(text):
            assert source in seen, f"{module} imports {source}, which stands later"
            for name in re.split(r",\s*", names.strip().strip(",")):
                exported = rf"^export {KINDS} {re.escape(name)}(?![\w$])"
                assert re.search(exported, static(source), re.MULTILINE), f"{source} does not export {name}"
        seen.add(module)


def test_no_string_spans_lines_so_that_comments_and_indentation_can_go():
    for module in MODULES:
        for number, line in enumerate(static(module).splitlines(), 1):
            assert line.count("`") % 2 == 0, (module, number)
    assert not re.search(r"^[ \t]*//|^[ \t]+\S|\s// [^\"'`]*$", script(), re.MULTILINE)


def test_every_import_is_used():
    for module in MODULES:
        body = IMPORT.sub("", static(module))
        for names, _ in IMPORT.findall(static(module)):
            for name in re.split(r",\s*", names.strip()):
                assert re.search(rf"(?<![\w$]){re.escape(name)}(?![\w$])", body), f"{module}: {name}"


def test_the_joined_page_has_no_module_syntax_left_and_names_no_address():
    page = shell()
    assert page.count(DATA) == 1
    assert "src=" not in page
    assert not re.search(r"^(import|export)\s", page, re.MULTILINE)
    assert set(re.findall(r"https?://[^\s\"')]+", page)) <= {"http://www.w3.org/2000/svg"}


def test_the_page_forbids_itself_the_network():
    policy = re.search('Content-Security-Policy" content="([^"]*)"', shell())[1]
    assert policy.startswith("default-src 'none';")
    assert "connect-src" not in policy
    assert "http" not in policy
