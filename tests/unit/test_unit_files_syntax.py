"""systemd's text formats: what is rendered is read back as it was, and odd files are read as systemd reads them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_watchdog.host.unit_files import resolve_specifiers
from sglang_watchdog.host.unit_syntax import (
    BadSyntax,
    ExecLine,
    assignments,
    expand,
    parse_environment,
    parse_exec,
    render_environment,
    render_exec,
    render_variable,
    split_words,
)

# No NUL in an argv, and no lone surrogates in UTF-8.
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
nasty = st.one_of(texts, st.text("$%;\\\"' {}\n\tüA=@-:", min_size=1))
printable = nasty.filter(str.isprintable)
paths = printable.map(lambda text: f"/{text}")


@given(path=paths, words=st.lists(nasty), prefix=st.sampled_from(["", "-", "+", "-:"]))
def test_a_rendered_command_is_read_back_as_it_was(path: str, words: list[str], prefix: str) -> None:
    line = ExecLine(prefix, (path, *words))
    (read,) = parse_exec(render_exec(line))
    assert ExecLine(read.prefix, tuple(resolve_specifiers(word, "a.service") for word in read.words)) == line


@given(path=paths, words=st.lists(nasty))
def test_a_rendered_command_is_one_line(path: str, words: list[str]) -> None:
    rendered = f"[Service]\nExecStart={render_exec(ExecLine('', (path, *words)))}\nType=simple\n"
    assert [key for key, _ in assignments(rendered, "Service")] == ["ExecStart", "Type"]


@given(words=st.lists(printable))
def test_a_rendered_variable_splits_into_the_words_it_was_made_of(words: list[str]) -> None:
    environment = parse_environment(render_environment({"OTHER": "x", "ARGS": render_variable(words)}))
    assert expand(ExecLine("", ("/bin/true", "$ARGS")), environment) == ("/bin/true", *words)


def test_a_control_character_is_refused_in_a_variable() -> None:
    with pytest.raises(BadSyntax, match="control character"):
        render_variable(["a\nb"])


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("/bin/x a  b", ["/bin/x", "a", "b"]),
        ("/bin/x 'a b' \"c d\" e'f g'h", ["/bin/x", "a b", "c d", "ef gh"]),
        (r"/bin/x a\x20b \s \\ \q é\u00e9 \101", ["/bin/x", "a b", " ", "\\", "\\q", "éé", "A"]),
        (r"/bin/x \; ';' a;b", ["/bin/x", ";", ";", "a;b"]),
        ('/bin/x "" $A ${B} $$C', ["/bin/x", "", "$A", "${B}", "$$C"]),
    ],
)
def test_a_command_line_is_split_as_systemd_splits_it(line: str, argv: list[str]) -> None:
    (read,) = parse_exec(line)
    assert list(read.argv) == argv


def test_the_marks_before_the_path_are_told_apart() -> None:
    (read,) = parse_exec("-@/usr/bin/python sglang -m sglang.launch_server")
    assert (read.prefix, read.words[0], read.argv[0]) == ("-@", "/usr/bin/python", "sglang")
    assert render_exec(read) == "-@/usr/bin/python sglang -m sglang.launch_server"
    (literal,) = parse_exec(":/bin/echo $A")
    assert expand(literal, {"A": "x"}) == ("/bin/echo", "$A")


def test_several_commands_may_stand_on_one_line() -> None:
    assert [line.argv for line in parse_exec("/bin/a 1 ; /bin/b 2 ;")] == [("/bin/a", "1"), ("/bin/b", "2")]


@pytest.mark.parametrize("line", ["/bin/x 'open", '/bin/x "open', "/bin/x lone\\"])
def test_a_line_that_systemd_ignores_is_refused(line: str) -> None:
    with pytest.raises(BadSyntax):
        parse_exec(line)


def test_continued_lines_and_comments_between_them_are_one_assignment() -> None:
    text = "; c\n[Unit]\nA=0\n[Service]\n# no\n A = 1 \\\n  # between\n  ; too\n  2 \\\\\\\n3\nnonsense\n[X-Own]\nA=4\n"
    assert list(assignments(text, "Service")) == [("A", "1    2 \\\\ 3")]
    assert list(assignments("[Service]\nA=1\\", "Service")) == [("A", "1")]


def test_variables_are_expanded_as_systemd_expands_them() -> None:
    environment = {"A": "one 'two three' \"\" f\\ our", "E": ""}
    line = ExecLine("", ("/bin/x", "$A", "${A}", "x$A", "x${A}y${E}", "$$A", "$E", "${E}", "$NONE", "${NONE}", "$5"))
    assert expand(line, environment) == (
        *("/bin/x", "one", "two three", "", "f our", environment["A"], "x$A", f"x{environment['A']}y"),
        *("$A", "", ""),
    )


def test_an_environment_file_is_read_as_systemd_reads_it() -> None:
    text = (
        '# comment\n; too\nA=plain words  \nB=\'si"ng\\le\'\nC="dou\\"ble \\n \\$x"\nD=jo\\\nined\nnonsense\n'
        "E=\n  F = spaced\nG='a'\"b\"c'd'\nH=\"two\nlines\"\nI=end\\ \n"
    )
    assert parse_environment(text) == {
        "A": "plain words",
        "B": 'si"ng\\le',
        "C": 'dou"ble \\n $x',
        "D": "joined",
        "E": "",
        "F": "spaced",
        "G": "abc'd'",
        "H": "two\nlines",
        "I": "end ",
    }


@given(text=nasty)
def test_any_text_can_be_read_as_an_environment_file(text: str) -> None:
    assert all("\n" not in name for name in parse_environment(text))


def test_words_of_a_list_are_unquoted() -> None:
    assert split_words('A=1 \'B=2 3\' "C=\\""') == ["A=1", "B=2 3", 'C="']


def test_specifiers_of_an_instance_are_resolved() -> None:
    word = resolve_specifiers("%n %N %p %i %I %j %% %t 100%", "sglang-big@a-b\\x2dc.service")
    assert word == "sglang-big@a-b\\x2dc.service sglang-big@a-b\\x2dc sglang-big a-b\\x2dc a/b-c big % /run 100%"
